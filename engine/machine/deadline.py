"""A time limit on the user's own code, which may wait for ever, catch every exception, or hang outside of Python.

The code runs in the main thread, because much of it needs that (``signal.alarm`` in verifiers). A thread beside it
interrupts it when its time is up. Code that goes on nevertheless ends with the process, which leaves its report first.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import TypeVar

from engine.machine import children

INTERRUPT = signal.SIGRTMIN + 5
"""The signal that interrupts the main thread: one that has no meaning to anybody else."""
GRACE = 5.0
"""Seconds in which the code must have ended once it was interrupted; it is interrupted again in each of them."""
LAST_WORDS = 10.0
"""Seconds in which the report must be written when the process ends itself."""

Result = TypeVar("Result")

_current: Limit | None = None
_last_words: list[Callable[[Exception], None]] = []


@contextlib.contextmanager
def last_words(write: Callable[[Exception], None]) -> Iterator[None]:
    """Has ``write`` called with the error if the process ends itself under code that cannot be interrupted."""
    _last_words.append(write)
    try:
        yield
    finally:
        _last_words.remove(write)


class _Expired(KeyboardInterrupt):
    """What the interrupted code sees. asyncio, and ``except Exception``, let a KeyboardInterrupt through."""


class Limit:
    """Calls something, for so long at most.

    Args:
        seconds: how long.
        error: what is raised after that, and said if the process must end.
    """

    def __init__(self, seconds: float, error: Exception) -> None:
        self._seconds, self._error = seconds, error
        self._expired, self._over = False, threading.Event()
        self._in_main_thread = threading.current_thread() is threading.main_thread()

    def call(self, function: Callable[[], Result]) -> Result:
        """What ``function`` returns. Outside of the main thread nothing interrupts it before the process ends.

        Raises:
            Exception: the limit's ``error``, also where ``function`` caught the interruption and returned.
        """
        try:
            try:
                self._start()
                result = function()
            finally:
                self._stop()
        except BaseException as raised:
            self._stop()  # the interruption may have come in the middle of the first one
            if self._expired:
                raise self._error from (None if isinstance(raised, _Expired) else raised)
            raise
        if self._expired:
            raise self._error
        return result

    def _start(self) -> None:
        global _current
        _current = self
        if self._in_main_thread:
            signal.signal(INTERRUPT, _interrupt)
        threading.Thread(target=self._watch, name="tandem-deadline", daemon=True).start()
        # C code that never gives up the interpreter's lock stops the thread too; this one needs no lock.
        faulthandler.dump_traceback_later(self._seconds + GRACE + 2 * LAST_WORDS, exit=True, file=2)

    def _stop(self) -> None:
        global _current
        _current = None
        self._over.set()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        if self._over.wait(self._seconds):
            return
        self._expired = True
        given_up = time.monotonic() + GRACE
        main = threading.main_thread().ident
        assert main is not None
        while time.monotonic() < given_up:
            if self._in_main_thread:
                signal.pthread_kill(main, INTERRUPT)
            if self._over.wait(1.0):
                return
        self._error.__traceback__ = _stack(sys._current_frames().get(main))
        writer = threading.Thread(target=_say_last_words, args=(self._error,), daemon=True)
        writer.start()
        writer.join(LAST_WORDS)
        traceback.print_exception(self._error)
        sys.stderr.flush()
        children.end()
        os._exit(1)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if _current is not None and _current._expired:  # else it came late
        raise _Expired


def _say_last_words(error: Exception) -> None:
    for write in _last_words:
        with contextlib.suppress(Exception):
            write(error)


def _stack(frame: FrameType | None) -> TracebackType | None:
    """Where a thread is, as the traceback of an exception that it would raise there."""
    where: TracebackType | None = None
    while frame is not None:
        where = TracebackType(where, frame, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    return where
