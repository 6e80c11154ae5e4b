"""Processes that a run has started and that must not outlive it, such as a reward's own pool of workers."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing.process
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

PR_SET_CHILD_SUBREAPER = 36  # of <linux/prctl.h>
PATIENCE = 1.0
"""Seconds that a process has to end itself after SIGTERM."""
KILLED = 3.0
"""Seconds that the kernel has to end one after SIGKILL."""


def run(main: Callable[[], int]) -> NoReturn:
    """Runs a command as this process's only work and ends with its exit status, and what it has started with it.

    The interpreter's own clean-up is left out: every file is written and closed by now, but threads of libraries
    (gloo's, a compiler's) may still be on their way out, and one that asks for the interpreter while it is being taken
    down aborts the process: a command that is done would then count as a failed one.
    """
    adopt()
    try:
        status = main()
    except Exception:
        traceback.print_exc()
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader has gone, or the caller had closed it
            stream.flush()
    end()
    os._exit(status)


def adopt() -> None:
    """Has processes whose parent ends before they do become children of this one, instead of the machine's first."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end() -> None:
    """Ends every process that descends from this one: by SIGTERM, or else by SIGKILL.

    Only for a process that is about to end itself: a pool of ``multiprocessing`` replaces a worker that ended, so from
    here on no process is started that way.
    """
    if not _descendants():
        return
    multiprocessing.process.BaseProcess.start = lambda *_: threading.Event().wait()  # type: ignore[method-assign,assignment]
    for number, patience in ((signal.SIGTERM, PATIENCE), (signal.SIGKILL, KILLED)):
        deadline = time.monotonic() + patience
        told: set[int] = set()
        while (alive := _descendants()) and time.monotonic() < deadline:
            for process in alive - told:
                _send(process, number)
            told |= alive
            time.sleep(0.01)


def _send(process: int, number: int) -> None:
    try:
        os.kill(process, number)
        os.kill(process, signal.SIGCONT)  # one that was stopped takes notice only when it goes on
    except (ProcessLookupError, PermissionError):
        pass


def _descendants() -> set[int]:
    """The processes below this one that still run."""
    children: dict[int, list[int]] = {}
    ended = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The command's name is in parentheses and may hold any character.
            state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
        except (OSError, ValueError):  # it has just ended
            continue
        children.setdefault(int(parent), []).append(int(entry.name))
        if state in "ZX":
            ended.add(int(entry.name))
    descendants: set[int] = set()
    below = [os.getpid()]
    while below:
        new = children.get(below.pop(), [])
        descendants.update(new)
        below += new
    return descendants - ended
