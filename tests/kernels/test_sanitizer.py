"""NVIDIA's compute-sanitizer on a small run of every kernel: no access out of bounds, no misaligned one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.helpers import ROOT, importing


@pytest.mark.gpu
def test_memcheck_is_clean():
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("no compute-sanitizer (it comes with the CUDA toolkit)")
    script = Path(__file__).with_name("sanitizer_run.py")
    environment = os.environ | {"PYTHONPATH": importing(ROOT)}
    command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout + done.stderr
