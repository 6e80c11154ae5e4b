"""How many processes a run has, and starting them on this machine. Imports no torch in the parent's checks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from engine.config import Config, ConfigError


def is_rank() -> bool:
    """True in a process that torchrun (or our own launch) started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def visible_gpus() -> int:
    """GPUs this process may use, without loading CUDA: the driver's device files, less what the environment hides."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    dev = Path("/dev")
    return sum(bool(re.fullmatch(r"nvidia\d+", entry.name)) for entry in dev.iterdir()) if dev.is_dir() else 0


def device_type(config: Config) -> str:
    """``cuda`` or ``cpu``, resolving ``auto``."""
    gpus = visible_gpus()
    if config.launch.device == "cuda" and gpus == 0:
        raise ConfigError("launch.device is cuda, but no NVIDIA GPU is visible here")
    return "cuda" if gpus and config.launch.device != "cpu" else "cpu"


def world_size(config: Config) -> int:
    """Ranks of the whole run: torchrun's, else ``launch.ranks``, else one a GPU or one on a CPU."""
    if is_rank():
        return int(os.environ["WORLD_SIZE"])
    gpus = visible_gpus() if device_type(config) == "cuda" else 0
    ranks = config.launch.ranks or max(1, gpus)
    if gpus and ranks > gpus:
        raise ConfigError(f"launch.ranks is {ranks}, but {gpus} GPU(s) are visible: one process a GPU")
    return ranks


def start_ranks(ranks: int, argv: list[str]) -> int:
    """Starts this command once a rank through torch's elastic launcher and waits; one failing rank ends all.

    Returns:
        the launcher's exit status: 0 if every rank ended well.
    """
    threads = max(1, (os.cpu_count() or 1) // ranks)
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0", "--local-addr=127.0.0.1", "-m", "engine.run", *argv,
    ]  # fmt: skip
    return subprocess.call(command, env={"OMP_NUM_THREADS": str(threads), **os.environ})
