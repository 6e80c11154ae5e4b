"""Starting ranks and whole runs from tests."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shlex
import socket
import subprocess
import sys
import time
import traceback
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryFile

ROOT = Path(__file__).resolve().parents[2]


def importing(*folders: Path) -> str:
    """A PYTHONPATH with these folders first."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def unranked() -> dict[str, str]:
    """The environment of a process that nobody launched, also where this one has joined a process group."""
    rank = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in rank}


GRACE = 10.0
"""Seconds that the other ranks have when one has failed: they may wait for it for ever."""


def free_port() -> int:
    """A port that nobody listens on, below those that the kernel gives to outgoing connections at any moment."""
    for port in random.sample(range(20000, 32000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port")


def run_ranks(ranks: int, *arguments: str, timeout: float = 240) -> str:
    """Runs ``python *arguments`` once a rank; gives rank 0's output, fails with the output of ranks that fail."""
    return rank_outputs(ranks, *arguments, timeout=timeout)[0]


def rank_outputs(ranks: int, *arguments: str, timeout: float) -> list[str]:
    """The same, with every rank's output."""
    shared = os.environ | {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": importing(ROOT),
    }
    with ExitStack() as stack:
        # Files, not pipes: a rank must be able to write while another's output is waited for.
        files = [stack.enter_context(TemporaryFile("w+")) for _ in range(ranks)]
        processes = [
            subprocess.Popen(
                [sys.executable, *arguments],
                env=shared | {"RANK": str(r), "LOCAL_RANK": str(r)},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            for r, file in enumerate(files)
        ]
        deadline = time.monotonic() + timeout
        try:
            while None in (ended := [one.poll() for one in processes]) and time.monotonic() < deadline:
                if any(ended):
                    deadline = min(deadline, time.monotonic() + GRACE)
                time.sleep(0.05)
        finally:
            for one in processes:
                one.kill()
                one.wait()
        outputs = [(file.seek(0), file.read())[1] for file in files]
    failures = [f"rank {r} ended with {status}:\n{outputs[r]}" for r, status in enumerate(ended) if status]
    hung = [f"rank {r} was killed after {timeout} s:\n{outputs[r]}" for r, status in enumerate(ended) if status is None]
    assert not (failures or hung), "\n".join(failures or hung)
    return outputs


def run_engine(
    arguments: str, ok: bool = True, timeout: float = 280, threads: int | None = 1, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m engine.run`` with shell-like arguments, by default with one thread a process.

    ``path`` is where it finds further Python modules.
    """
    env = unranked() | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    result = subprocess.run(
        [sys.executable, "-m", "engine.run", *shlex.split(arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=env | ({"PYTHONPATH": importing(path)} if path else {}),
    )
    assert (result.returncode == 0) == ok, result.stdout[-3000:] + result.stderr[-6000:]
    return result


def run_here(arguments: str, ok: bool = True) -> subprocess.CompletedProcess[str]:
    """The same command in this process, without the seconds that another takes to start: for one rank and ``hf``."""
    import torch

    import engine.run

    said, complained, threads = io.StringIO(), io.StringIO(), torch.get_num_threads()
    words = shlex.split(arguments)
    torch.set_num_threads(1)  # as in the processes of the others
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
        try:
            status = engine.run.main(words)
        except Exception:
            traceback.print_exc()
            status = 1
        finally:
            torch.set_num_threads(threads)
    result = subprocess.CompletedProcess(words, status, said.getvalue(), complained.getvalue())
    assert (status == 0) == ok, result.stdout[-3000:] + result.stderr[-6000:]
    return result


def steps(run: Path) -> list[dict]:
    """The training steps recorded in a run folder's metrics.jsonl."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "time/step" in row]
