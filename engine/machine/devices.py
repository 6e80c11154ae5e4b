"""Which ranks and devices a run has: told by its configuration, a launcher's environment and the driver's files.

Imports no torch.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from engine.config import Config, ConfigError

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun and deepspeed tell each rank. An address and a port alone make no rank of a process."""


def is_rank() -> bool:
    """True in a process that torchrun (or our own launch) started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def several_nodes() -> bool:
    """True in a rank whose launcher, torchrun or deepspeed, says that other machines have ranks of the run as well."""
    here = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or ""  # torchrun's or deepspeed's word
    everywhere = os.environ.get("WORLD_SIZE", "")
    return here.isdecimal() and everywhere.isdecimal() and int(here) < int(everywhere)


def visible_gpus() -> int:
    """GPUs this process may use, without loading CUDA: the driver's device files, less what the environment hides."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    dev = Path("/dev")
    return sum(bool(re.fullmatch(r"nvidia\d+", entry.name)) for entry in dev.iterdir()) if dev.is_dir() else 0


def device_type(config: Config) -> str:
    """``cuda`` or ``cpu``, resolving ``auto``."""
    gpus = visible_gpus()
    if config.memory.explain and config.memory.gpu_gib and config.launch.device != "cpu":
        return "cuda"  # a plan for a GPU that need not be here
    if config.launch.device == "cuda" and gpus == 0:
        raise ConfigError("launch.device is cuda, but no NVIDIA GPU is visible here")
    return "cuda" if gpus and config.launch.device != "cpu" else "cpu"


def world_size(config: Config) -> int:
    """Ranks of the whole run: torchrun's, else ``launch.ranks``, else one a GPU, or on a CPU as few as can be.

    Raises:
        ConfigError: there are not so many GPUs, or a launcher's environment is there only in part, or is of another
            number of ranks.
    """
    if any(name in os.environ for name in LAUNCHED[:3]):
        _check_launched(config)
        return int(os.environ["WORLD_SIZE"])
    gpus = visible_gpus() if device_type(config) == "cuda" else 0
    ranks = config.launch.ranks or max(1, gpus, config.generating_ranks and config.generating_ranks + 1)
    if gpus and ranks > gpus:
        raise ConfigError(f"launch.ranks is {ranks}, but {gpus} GPU(s) are visible: one process a GPU")
    return ranks


def _check_launched(config: Config) -> None:
    """A rank needs all that torchrun and deepspeed set; a shell in which some of it was left is no rank."""
    given = [name for name in LAUNCHED if os.environ.get(name, "") != ""]
    present = [name for name in LAUNCHED if name in os.environ]
    remedy = f"start with torchrun or deepspeed, or run: unset {' '.join(present)}"
    if lacking := [name for name in LAUNCHED if name not in given]:
        raise ConfigError(
            f"the environment variable(s) {', '.join(given or present)} say that this process is a rank, but "
            f"{', '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} missing: {remedy}"
        )
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        text = os.environ[name]
        if not (text.isascii() and text.isdigit()):
            raise ConfigError(f"the environment variable {name} is '{text}', not a number: {remedy}")
        numbers[name] = int(text)
    rank, ranks, local = numbers["RANK"], numbers["WORLD_SIZE"], numbers["LOCAL_RANK"]
    if rank >= ranks or local >= ranks:
        name = "RANK" if rank >= ranks else "LOCAL_RANK"
        raise ConfigError(
            f"the environment variable {name} is {numbers[name]}, but WORLD_SIZE is {ranks}; ranks count from 0: "
            f"{remedy}"
        )
    if not 0 < numbers["MASTER_PORT"] < 2**16:
        raise ConfigError(f"the environment variable MASTER_PORT is {numbers['MASTER_PORT']}, no port: {remedy}")
    here = os.environ.get("LOCAL_WORLD_SIZE", str(ranks))  # torchrun's; launch.ranks are those of this machine
    if config.launch.ranks and str(config.launch.ranks) not in (here, str(ranks)):
        raise ConfigError(
            f"launch.ranks is {config.launch.ranks}, but a launcher's environment variable WORLD_SIZE is {ranks}: "
            f"leave launch.ranks out, or run: unset {' '.join(present)}"
        )
    gpus = visible_gpus()
    if device_type(config) == "cuda" and gpus and local >= gpus:
        raise ConfigError(
            f"LOCAL_RANK is {local}, but {gpus} GPU(s) are visible on this machine: one process a GPU "
            "(torchrun --nproc-per-node)"
        )
