"""Starts runs of Tandem in forks of one process that has imported the libraries they need, and none of Tandem's own.

A small run takes a second or two, its imports ten times as long. scripts/compare_commits.py starts this file with a
commit's folder in PYTHONPATH and writes a ``Plan`` to its standard input. A line of JSON comes for each run that has
ended.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from typing import Any, NoReturn, TextIO, TypedDict

GRACE = 10.0
"""Seconds that the other ranks have when one has failed: they may wait for it for ever."""


class Command(TypedDict):
    """One call of ``engine.run``, with the exit status that each rank is to have."""

    arguments: list[str]
    environment: dict[str, str]
    expected: int


class Job(TypedDict):
    """One run: commands that follow each other, each on so many ranks, and the folder for what the ranks print."""

    name: str
    commands: list[Command]
    ranks: int
    folder: str


class Plan(TypedDict):
    """Runs, how many of them go at a time, the seconds that each may take, and the modules to import first."""

    jobs: list[Job]
    at_a_time: int
    timeout: float
    imports: list[str]


class Running:
    """A run in progress."""

    def __init__(self, job: Job, timeout: float) -> None:
        self.job, self._commands = job, list(job["commands"])
        self.started = time.perf_counter()
        self._deadline = self.started + timeout
        self._pids: dict[int, int] = {}
        """Those that still run, by rank."""
        self._start()

    def _start(self) -> None:
        command = self._commands.pop(0)
        self._expected = command["expected"]
        port = str(_free_port())
        for rank in range(self.job["ranks"]):
            environment = dict(command["environment"])
            if self.job["ranks"] > 1:  # as torchrun would
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.job["ranks"])}
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            pid = os.fork()
            if not pid:
                _become(command["arguments"], environment, self._output(rank))
            self._pids[rank] = pid

    def _output(self, rank: int) -> str:
        return os.path.join(self.job["folder"], f"output-{rank}")

    def ended(self) -> dict[str, Any] | None:
        """What to report of the run, once it is over."""
        failed = None
        for rank, pid in list(self._pids.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if not found:
                continue
            del self._pids[rank]
            if (code := os.waitstatus_to_exitcode(status)) != self._expected:
                failed = f"rank {rank} ended with status {code}, and not {self._expected}:\n{_tail(self._output(rank))}"
                break
        if failed is None and self._pids and time.perf_counter() > self._deadline:
            failed = "has taken too long"
        if failed is None and (self._pids or self._commands):
            if not self._pids:
                self._start()
            return None
        self.kill(GRACE if failed else 0.0)
        return {"name": self.job["name"], "seconds": time.perf_counter() - self.started, "failed": failed}

    def kill(self, grace: float = 0.0) -> None:
        """Ends what still runs, after seconds of grace."""
        deadline = time.perf_counter() + grace
        while self._pids:
            for rank, pid in list(self._pids.items()):
                if time.perf_counter() > deadline:
                    os.kill(pid, signal.SIGKILL)
                if os.waitpid(pid, os.WNOHANG)[0]:
                    del self._pids[rank]
            time.sleep(0.02)


def _become(arguments: list[str], environment: dict[str, str], output: str) -> NoReturn:
    """Turns this fork into ``python -m engine.run``."""
    status = 1
    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(file, stream)
        os.environ.update(environment)
        sys.argv = ["engine.run", *arguments]
        runpy.run_module("engine.run", run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tail(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return "".join(file.readlines()[-15:]).strip()


def main(plan: Plan, report: TextIO) -> None:
    """Runs all jobs; a line to ``report`` for each that ends."""
    for name in plan["imports"]:
        importlib.import_module(name)
    if (threads := len(os.listdir("/proc/self/task"))) > 1:  # a fork has one, and what another held stays locked
        sys.exit(f"error: the imports have started {threads - 1} thread(s)")
    waiting, running = list(plan["jobs"]), []
    try:
        while waiting or running:
            while waiting and len(running) < plan["at_a_time"]:
                running.append(Running(waiting.pop(0), plan["timeout"]))
            for one in list(running):
                if (ended := one.ended()) is not None:
                    running.remove(one)
                    print(json.dumps(ended), file=report, flush=True)
            time.sleep(0.02)
    finally:
        for one in running:
            one.kill()


if __name__ == "__main__":
    given = json.load(sys.stdin)
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print while they are imported is no report
    main(given, lines)
