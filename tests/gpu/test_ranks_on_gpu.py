"""Ranks on GPUs: what the driver says of their memory, and that it is free again soon after any process is killed."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from engine.config import cli
from engine.memory import planning
from tests.system.conftest import tiny_model  # noqa: F401
from tests.system.test_runs import QUICK, short
from tests.system.test_signals import ENDLESS, Running, rank_of, until

pytestmark = pytest.mark.gpu

HELD = 200
"""MiB by which a GPU in use must differ from a free one; a CUDA context alone takes more."""


def used() -> list[int]:
    """MiB in use on each GPU that this process may see."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={visible}")
    return [int(line) for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]


def test_the_driver_tells_what_cuda_tells() -> None:
    config, _ = cli.parse(["--config", str(QUICK)])
    smallest = min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
    assert planning.gpu_bytes(config) == pytest.approx(smallest, rel=0.01)


@pytest.mark.parametrize("ranks,victim", [(1, "0"), (2, "0"), (2, "1"), (2, "launcher")])
def test_a_killed_process_frees_every_gpu(ranks: int, victim: str, tiny_model: str, tmp_path: Path) -> None:  # noqa: F811
    """The other rank waits for the dead one inside NCCL, where it sees no signal."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    before = used()
    arguments = f"--launch.device cuda --launch.ranks {ranks} --generation.max_logprob_gap 1 "
    # A first step on a GPU has kernels to compile.
    running = Running(short(tiny_model, tmp_path, "r") + ENDLESS + arguments, tmp_path / "r", start=180)
    try:
        assert sum(now > free + HELD for now, free in zip(used(), before, strict=True)) == ranks
        pids = {rank_of(pid): pid for pid in running.below} if ranks > 1 else {"0": running.process.pid}
        os.kill(pids.get(victim, running.process.pid), signal.SIGKILL)
        assert until(lambda: all(now <= free + HELD for now, free in zip(used(), before, strict=True)), 10), used()
    finally:
        running.end(0)
    assert running.process.returncode != 0
