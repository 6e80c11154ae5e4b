"""Starting the ranks of a run on this machine."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from engine.launch import failures

FOLDER_FILE = "TANDEM_FOLDER_FILE"
"""The environment variable with the file in which rank 0 tells our launcher the run folder."""
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""A rank's exit status after a signal, also one that another rank got and swallowed."""
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


def plain_architectures(listed: str) -> str:
    """A TORCH_CUDA_ARCH_LIST as DeepSpeed can read it: numbers and ``+PTX``.

    ``9.0a``, which PyTorch takes, ends DeepSpeed's compilation of its operators with an error; 9.0 runs on the same
    GPU. Names (``Hopper``) are dropped.
    """
    entries = (re.fullmatch(r"(\d+\.\d+)[a-z]?(\+PTX)?", entry) for entry in re.split(r"[;\s]+", listed))
    return ";".join(dict.fromkeys(entry[1] + (entry[2] or "") for entry in entries if entry))


def mute_libraries() -> None:
    """Leaves out warnings of libraries about their own insides, which nobody who runs this can act on."""
    warnings.filterwarnings("ignore", r".*`torch\.distributed\.\w+` is deprecated")


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
