"""How runs end that are stopped, killed, or failed by one rank: who dies, with what status, what is left to read."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.system.helpers import ROOT, run_engine, steps
from tests.system.test_runs import short

ENDLESS = "--algo rloo --train.steps 100000 --eval.prompts 8 --rollout.max_response_tokens 4 "

pytestmark = pytest.mark.alone


def until(true: Callable[[], object], seconds: float) -> bool:
    """Waits for something to become true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.1)
    return False


def alive(pid: int) -> bool:
    """True for a process that runs; a zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    """The processes below one."""
    try:
        children = [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [one for child in children for one in (child, *descendants(child))]


def rank_of(pid: int) -> str | None:
    """A process's RANK in its environment."""
    for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        if entry.startswith(b"RANK="):
            return entry[5:].decode()
    return None


class Running:
    """An engine that has finished its first step, in ``start`` seconds, and every process below it."""

    def __init__(self, arguments: str, run: Path, start: float = 60) -> None:
        self.run = run
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engine.run", *shlex.split(arguments)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        trains = until(lambda: self._steps() or self.process.poll() is not None, start)
        self.below = descendants(self.process.pid)
        assert trains and self.process.poll() is None, self.end(0)

    def _steps(self) -> list[dict]:
        return steps(self.run) if (self.run / "metrics.jsonl").exists() else []

    def end(self, seconds: float) -> str:
        """Waits for the end of everything and gives the output; kills what is left, and fails for it."""
        everything = [self.process.pid, *self.below]
        in_time = until(lambda: not any(alive(pid) for pid in everything), seconds)
        for pid in everything:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        output = self.process.communicate()[0]
        assert in_time or not seconds, f"something still ran after {seconds} s\n{output[-3000:]}"
        return output


@pytest.fixture
def start(tiny_model: str, tmp_path: Path) -> Iterator[Callable[[str], Running]]:
    """Starts engines that would train for hours, and leaves none behind."""
    started: list[Running] = []

    def starting(arguments: str) -> Running:
        started.append(Running(short(tiny_model, tmp_path, "r") + ENDLESS + arguments, tmp_path / "r"))
        return started[-1]

    yield starting
    for one in started:
        for pid in [one.process.pid, *one.below]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_terminated_run_leaves_its_report(start, ranks: int) -> None:
    """With SIGTERM as with Ctrl-C, and with a second one while it writes."""
    running = start(f"--launch.ranks {ranks}")
    assert {rank_of(pid) for pid in running.below} >= ({"0", "1"} if ranks == 2 else set())
    running.process.terminate()
    if ranks == 1:
        time.sleep(0.3)
        running.process.terminate()
    output = running.end(20)
    assert running.process.returncode == 143, output
    assert (running.run / "crash.txt").read_text().startswith("KeyboardInterrupt: SIGTERM")
    assert "was stopped by hand" in (running.run / "report.html").read_text()
    assert "Stopped after step" in output


@pytest.mark.slow
def test_a_killed_launcher_takes_the_ranks_along(start) -> None:
    running = start("--launch.ranks 2")
    assert {rank_of(pid) for pid in running.below} >= {"0", "1"}
    running.process.kill()
    running.end(10)


def test_a_killed_rank_ends_the_run_and_is_named(start) -> None:
    running = start("--launch.ranks 2")
    for pid in running.below:
        if rank_of(pid) == "1":
            os.kill(pid, signal.SIGKILL)
    output = running.end(10)
    assert running.process.returncode == 1
    last = output.strip().splitlines()[-1]
    assert "rank 1 failed" in last and "SIGKILL" in last and "report.html" in last, output
    assert (running.run / "crash.txt").read_text().startswith("rank 1 failed")
    assert "SIGKILL" in (running.run / "report.html").read_text()


@pytest.mark.slow
def test_a_rank_that_waits_beyond_python_is_killed_too(start, tmp_path: Path) -> None:
    """A lock that is never given stands for a collective on the GPU: C code that no signal ends."""
    (tmp_path / "stuck.py").write_text(
        "import ctypes, os, signal\n"
        "def reward(completions, **_):\n"
        f"    if os.path.exists('{tmp_path}/now'):\n"
        "        if os.environ['RANK'] == '1':\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        lock = ctypes.create_string_buffer(64)\n"
        "        for _ in range(2):\n"
        "            ctypes.CDLL(None).pthread_mutex_lock(lock)\n"
        "    return [0.0] * len(completions)\n"
    )
    running = start(f"--launch.ranks 2 --reward.function {tmp_path}/stuck.py:reward")
    (tmp_path / "now").touch()
    output = running.end(10)
    assert running.process.returncode == 1
    last = output.strip().splitlines()[-1]
    assert "rank 1 failed" in last and "SIGKILL" in last and "report.html" in last, output
    assert "SIGKILL" in (running.run / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_the_failing_rank_s_error_is_the_one_reported(tiny_model: str, tmp_path: Path, rank: int) -> None:
    (tmp_path / "bad.py").write_text(
        f"import os\ndef reward(completions, **_):\n    assert os.environ['RANK'] != '{rank}', 'it is my fault'\n"
        "    return [0.0] * len(completions)\n"
    )
    more = f"--algo rloo --launch.ranks 2 --reward.function {tmp_path}/bad.py:reward"
    result = run_engine(short(tiny_model, tmp_path, "c") + more, ok=False, timeout=120)
    run = tmp_path / "c"
    what = (run / "crash.txt").read_text().splitlines()[0]
    assert "it is my fault" in what and ("rank 1 failed: " in what) == (rank == 1)
    assert "it is my fault" in (run / "report.html").read_text()
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(f"error: rank {rank} failed: ") and "it is my fault" in last and "report.html" in last
    left = [path.name for path in run.glob("crash-rank-*")]
    assert left == (["crash-rank-1.txt"] if rank == 1 else [])
    # The failing rank's, not what followed from it in the other.
    assert result.stderr.count("Traceback") == 1, result.stderr
    if rank == 1:
        assert "bad.py" in (run / left[0]).read_text(), "its traceback"
