"""The CUDA C++ kernels compile as they are meant to run; needs nvcc, and no GPU."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BUILD = Path(__file__).resolve().parents[2] / "csrc/cuda/build.py"
# One of each kind, and of each way to share: the largest accumulators, a cluster, halves and turns.
VARIANTS = (
    "mainloop_turns_128x192_s5|scan_turns_128x192_s4_shareB|scan_halves_128x256_s4|forward_turns_128x128_s7_shareB"
    "|dhidden_turns_128x192_s4_shareB|dweight_halves_256x128_s4|dweight_fp32_halves_128x256_s4_shareB|dweight_add_turns_128x128_s6_shareB"
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("nvcc") is None and not Path("/usr/local/cuda/bin/nvcc").exists(), reason="no nvcc"
    ),
]


def test_the_kernels_keep_their_numbers_in_registers(tmp_path: Path) -> None:
    """No spills, no serialised products, no setmaxnreg that the compiler passes over; the module can be imported."""
    only = f"^({VARIANTS})$"
    done = subprocess.run(
        [sys.executable, str(BUILD), str(tmp_path), "--only", only], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "build.json").read_text())
    assert sorted(figures) == sorted(VARIANTS.split("|"))
    for name, figure in figures.items():
        assert figure == {"registers": 168, "spill_bytes": 0, "warnings": []}, name
    script = "import _cuda, json; print(json.dumps(_cuda.names()))"
    names = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert sorted(json.loads(names.stdout)) == sorted(figures)
