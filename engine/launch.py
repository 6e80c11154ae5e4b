"""How many processes a run has, and starting them on this machine. The checks import no torch."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from engine import failures
from engine.config import Config, ConfigError

FOLDER_FILE = "TANDEM_FOLDER_FILE"
"""The environment variable with the file in which rank 0 tells our launcher the run folder."""
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun and deepspeed tell each rank. An address and a port alone make no rank of a process."""
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""A rank's exit status after a signal, also one that another rank got and swallowed."""
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


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
    there = [name for name in LAUNCHED if os.environ.get(name, "") != ""]
    present = [name for name in LAUNCHED if name in os.environ]
    remedy = f"start with torchrun or deepspeed, or run: unset {' '.join(present)}"
    if lacking := [name for name in LAUNCHED if name not in there]:
        raise ConfigError(
            f"the environment variable(s) {', '.join(there or present)} say that this process is a rank, but "
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


def plain_architectures(listed: str) -> str:
    """A TORCH_CUDA_ARCH_LIST as DeepSpeed can read it: numbers and ``+PTX``.

    ``9.0a``, which PyTorch takes, ends DeepSpeed's compilation of its operators with an error; 9.0 runs on the same
    GPU. Names (``Hopper``) are dropped.
    """
    entries = (re.fullmatch(r"(\d+\.\d+)[a-z]?(\+PTX)?", entry) for entry in re.split(r"[;\s]+", listed))
    return ";".join(dict.fromkeys(entry[1] + (entry[2] or "") for entry in entries if entry))


def tidy_environment(device_type: str) -> None:
    """Sets what DeepSpeed reads when it is imported, and takes out what it cannot read, for this process alone."""
    os.environ.setdefault("DS_ACCELERATOR", device_type)
    if listed := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        os.environ["TORCH_CUDA_ARCH_LIST"] = plain_architectures(listed)
        if not os.environ["TORCH_CUDA_ARCH_LIST"]:  # then DeepSpeed asks the GPU
            del os.environ["TORCH_CUDA_ARCH_LIST"]


def start_ranks(ranks: int, argv: list[str]) -> int:
    """Starts this command once a rank through torch's elastic agent and waits; one failing rank ends all.

    The agent runs in this process. It passes SIGTERM and Ctrl-C on to the ranks, and kills what has not ended 30 s
    later. If this process is killed, the kernel kills the ranks (``die_with_launcher``).

    Args:
        argv: the arguments of ``engine.run``.

    Returns:
        0 if every rank ended well, 1 if one failed, 2 for a configuration that cannot work, 128 and the signal's number
        if a signal ended the run.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # we say it, in one line
    how = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="tandem",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=0,
    )
    with tempfile.TemporaryDirectory(prefix="tandem-") as messages, _environment():
        folder_file = Path(messages) / "folder"
        os.environ[FOLDER_FILE] = str(folder_file)
        os.environ[failures.REFUSAL_FILE] = str(Path(messages) / "refusal")
        os.environ[failures.LAUNCHER] = str(os.getpid())
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
        try:
            elastic_launch(how, sys.executable)("-u", "-m", "engine.run", *argv)
        except SignalException as stopped:
            print("interrupted", file=sys.stderr)
            return 128 + stopped.sigval
        except ChildFailedError as failed:
            if line := failures.refusal():
                print(line, file=sys.stderr)
                return 2
            rank, failure = failed.get_first_failure()
            told = folder_file.read_text(encoding="utf-8") if folder_file.exists() else ""
            run_dir = Path(told) if told else None
            if failure.exitcode in STOPPED and failures.was_stopped(run_dir):
                print("interrupted", file=sys.stderr)
                return failure.exitcode
            killed = failure.exitcode < 0 and failure.exitcode != -signal.SIGABRT  # NCCL aborts when a peer is gone
            what = failure.message if failure.exitcode < 0 else f"exit status {failure.exitcode}"
            failures.tell(run_dir, rank, what, killed)
            return 1
    return 0


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Leaves the environment as it was."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def tell_folder(run_dir: Path) -> None:
    """Rank 0 tells our launcher, if that started it, where the run's files lie."""
    if FOLDER_FILE in os.environ:
        Path(os.environ[FOLDER_FILE]).write_text(str(run_dir), encoding="utf-8")


def die_with_launcher() -> None:
    """Has the kernel kill this rank when the agent that started it ends, even by SIGKILL, which it cannot pass on."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # not started by an agent: the parent may be a shell that may leave
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The launcher may have gone before the line above, and then no signal comes. Only our own told us its number;
    # a torchrun that dies so early leaves ranks that cannot join and end at their timeout.
    if failures.LAUNCHER in os.environ and os.getppid() != int(os.environ[failures.LAUNCHER]):
        sys.exit("the launcher is gone")
