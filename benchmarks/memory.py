"""The extra memory that a call takes at its peak, besides what was there before and the gradients that it returns.

On a GPU PyTorch's allocator knows. On a CPU a process of its own measures its resident set, so that memory of libraries
counts, and nothing is hidden in what other implementations have left behind:
``python -m benchmarks.memory CASE IMPLEMENTATION`` prints the gibibytes.
"""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import cases
from benchmarks.competitors import COMPETITORS, Outcome
from benchmarks.inputs import make_gae_inputs, make_inputs

GIB = 1 << 30
ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 120


def gradient_bytes(outcome: Outcome) -> int:
    """Of dX and dW."""
    return sum(value.nbytes for value in outcome.gradients)


def cuda_extra_gib(call: Callable[[], Outcome], before: int) -> tuple[Outcome, float]:
    """The call's outcome and its extra memory; ``before`` was allocated before an earlier call could keep any."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    outcome = call()
    torch.cuda.synchronize()
    return outcome, max(0, torch.cuda.max_memory_allocated() - before - gradient_bytes(outcome)) / GIB


def cpu_extra_gib(case: cases.Case, implementation: str) -> float:
    """The extra memory, measured in a new process.

    Raises:
        RuntimeError: it failed; the message has its last words.
    """
    command = [sys.executable, "-m", "benchmarks.memory", case.id, implementation]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT)
    if run.returncode:
        raise RuntimeError(run.stderr.strip().splitlines()[-1] if run.stderr.strip() else f"exit {run.returncode}")
    return float(run.stdout)


def resident_bytes(field: str) -> int:
    """``"VmRSS"``, or ``"VmHWM"`` for the highest since :func:`forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise LookupError(field)


def forget_peak() -> None:
    """Give free memory back to the system and start VmHWM anew."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def main(arguments: list[str]) -> None:
    """Measures one call; one on a few rows before it loads what is loaded once."""
    case = next(case for case in cases.small() if case.id == arguments[0])
    make = make_gae_inputs if case.name == "gae" else make_inputs
    for size in (cases.SEQUENCE, case.T) if case.name == "gae" else (16, case.T):
        sized = replace(case, T=size)
        inputs = make(sized, "cpu", 0)
        run = COMPETITORS[arguments[1]].prepare(sized, inputs)
        forget_peak()
        before = resident_bytes("VmRSS")
        outcome = run(inputs)
        extra = resident_bytes("VmHWM") - before - gradient_bytes(outcome)
        del outcome
    print(max(0, extra) / GIB)


if __name__ == "__main__":
    main(sys.argv[1:])
