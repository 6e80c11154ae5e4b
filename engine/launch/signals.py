"""SIGTERM and Ctrl-C: how they end a process of a run, with a report, even where some code swallows them.

What is remembered of them is this module's own; others ask ``stop_requested`` and ``asked_to_end``.
"""

from __future__ import annotations

import functools
import math
import os
import signal
import sys
import threading
import time
from types import FrameType

DEAF = 5.0
"""Seconds after SIGTERM in which a rank has to take notice of it."""

AGAIN = 5.0
"""Seconds in which a second signal is taken for the first: a terminal and a launcher both send theirs. Later it means
that the first was swallowed, by a bare ``except`` of a reward function, say."""

_ending = False  # a signal interrupts nothing any more
_told = False  # by a SIGTERM that came when the run was already ending
_asked = 0  # the number of the signal that asked the run to end
_asked_at = -math.inf
_raised = 0  # how often that was raised as a KeyboardInterrupt


def stop_on_sigterm(is_rank: bool) -> None:
    """Makes SIGTERM (timeout, docker stop, Slurm) end this process like Ctrl-C, with a report.

    A signal that is swallowed is remembered (``stop_requested``): the loop ends after its step. Another one, ``AGAIN``
    seconds later, is raised as the first was, and a third one ends the process on the spot.

    Python looks at signals between two of its own instructions, and a rank that waits in CUDA for one that is gone
    comes to no other. It would hold its GPU for the launcher's 30 s, so it is killed before.
    """
    global _ending, _told, _asked, _asked_at, _raised
    _ending = _told = False
    _asked, _asked_at, _raised = 0, -math.inf, 0
    signal.signal(signal.SIGTERM, _stop)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as nohup and background jobs have it
        signal.signal(signal.SIGINT, _stop)
    sys.unraisablehook = _not_lost
    _children_as_usual()
    if not is_rank:
        return
    ear, mouth = os.pipe()
    os.set_blocking(mouth, False)
    signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)  # C code writes each signal's number there at once
    threading.Thread(target=_end_if_deaf, args=(ear,), name="tandem-sigterm", daemon=True).start()


@functools.cache
def _children_as_usual() -> None:
    """Lets signals do to forked processes, such as a reward's pool, what they do to any Python program's.

    With ``_stop`` a worker that is told to end could lose the signal, and its pool would wait for it without end; with
    the wakeup's pipe it would tell this process. Signals wait until the child has its own handlers.
    """
    forking = threading.local()

    def before() -> None:
        forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})

    def in_parent() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, forking.mask)

    def in_child() -> None:
        for number, usual in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
            if signal.getsignal(number) is _stop:
                signal.signal(number, usual)
        signal.set_wakeup_fd(-1)
        in_parent()

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)


def interrupt_no_more() -> None:
    """From here on neither SIGTERM nor Ctrl-C interrupts this process: its report is due."""
    global _ending
    _ending = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def asked_to_end() -> bool:
    """True if a signal has asked this process to end, also one that interrupted nothing: then it was SIGTERM."""
    return _told or bool(_asked)


def stop_requested() -> int:
    """The number of the signal that asked this process to end, which something swallowed; 0 if none came."""
    return _asked


def stopped(number: int) -> KeyboardInterrupt:
    """What ends a run that the signal ``number`` asked to end."""
    return KeyboardInterrupt("SIGTERM") if number == signal.SIGTERM else KeyboardInterrupt()


def exit_status(error: KeyboardInterrupt) -> int:
    """The exit status after Ctrl-C or SIGTERM, as a shell gives it."""
    return 128 + (signal.SIGTERM if "SIGTERM" in error.args else signal.SIGINT)


def _end_if_deaf(ear: int) -> None:
    while os.read(ear, 1)[0] != signal.SIGTERM:
        pass
    time.sleep(DEAF)
    if not (_ending or _asked):
        os.kill(os.getpid(), signal.SIGKILL)


def _stop(signum: int, frame: FrameType | None) -> None:
    global _told, _asked, _asked_at, _raised
    if _ending:
        _told = _told or signum == signal.SIGTERM
        return
    now = time.monotonic()
    if _asked and now - _asked_at < AGAIN:
        return
    _asked, _asked_at, _raised = _asked or signum, now, _raised + 1
    if _raised > 2:  # swallowed twice, as by an endless loop around a bare except
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
        return
    raise stopped(signum)


def _not_lost(lost: sys.UnraisableHookArgs) -> None:
    """Gives a signal once more that came in a ``__del__``, out of which no exception leads."""
    global _asked_at, _raised
    if type(lost.exc_value) is not KeyboardInterrupt:  # a time limit's is no signal
        sys.__unraisablehook__(lost)
        return
    _asked_at, _raised = -math.inf, _raised - 1
    number = signal.SIGTERM if "SIGTERM" in lost.exc_value.args else signal.SIGINT
    threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
