"""Triton compiles for a GPU that is not there: what would fail at a first launch fails here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.helpers import ROOT, importing

pytest.importorskip("triton")

# An epilogue that real models rarely run may spill a few registers; a mainloop must not.
MOST_STACK = {"hopper": 64, "portable": 512}


FEWEST = {"rows": 30, "hopper": 60, "portable": 30}
"""Kernels that a part of the script compiles at least."""


@pytest.mark.parametrize(
    "part", ["rows", *(pytest.param(heads, marks=pytest.mark.slow) for heads in ("hopper", "portable"))]
)
def test_every_launch_compiles_and_none_spills(part):
    script = Path(__file__).with_name("compile_for_hopper.py")
    environment = os.environ | {"PYTHONPATH": importing(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, script, part], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    again = [line for line in done.stdout.splitlines() if line.startswith("again")]
    assert not again, "another number of rows has it compiled anew"
    stack = {line: int(line.split()[1]) for line in done.stdout.splitlines()}
    assert len(stack) >= FEWEST[part]
    hopper = {line: size for line, size in stack.items() if "STAGES=" in line}
    assert (len(hopper) > 10) is (part == "hopper")
    assert max(hopper.values(), default=0) <= MOST_STACK["hopper"], max(hopper, key=lambda line: hopper[line])
    assert max(stack.values()) <= MOST_STACK["portable"], max(stack, key=lambda line: stack[line])
