"""The end of a run that failed: which rank's error is the one to show, and how it gets to the one that shows it.

One failing rank takes the others down with it: they see a closed connection, or the launcher's SIGTERM. So a rank other
than 0 leaves its own error as a file in the run folder, and rank 0, or the launcher, reports that one. A rank that
waits for a dead one inside a collective on the GPU sees neither: a thread of its own kills it (``signals``).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
import traceback
from pathlib import Path

from engine.config import ConfigError
from engine.launch import signals
from engine.machine.meeting import Meeting
from engine.report import records
from engine.report.html import write_report

PATIENCE = 3.0
"""Seconds rank 0 waits for another rank's file: that rank writes it first and then closes its connections, but the run
folder may lie on a network file system."""

LAUNCHER = "TANDEM_LAUNCHER"
"""The environment variable that tells a rank the process number of our launcher, on whose machine all ranks are."""

REFUSAL_FILE = "TANDEM_REFUSAL_FILE"
"""The environment variable with the file in which the first rank that refuses the run tells our launcher why."""

LONGEST = 1000
"""Characters of a line; what is cut out of a longer one is its middle."""

_REFUSED = f"{ConfigError.__module__}.{ConfigError.__qualname__}: "


class RankFailed(RuntimeError):
    """Another rank's error, as rank 0 reports it."""


def one_line(text: str) -> str:
    """``text`` in one line that a terminal can show."""
    line = " ".join(text.split())
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} [...] {line[-LONGEST // 2 :]}"


def refuse(error: ConfigError, meeting: Meeting | None = None) -> int:
    """Says why a run cannot be, in one line whatever the number of ranks; gives the exit status.

    Ranks of our launcher hand it over, and the launcher prints the first one. Of another launcher's ranks the first of
    each machine prints; the others wait to be ended by their launcher, and print if they alone refuse.

    Args:
        meeting: of the ranks of a run that may be on several nodes, none of which may wait for this one in vain.
    """
    line = f"error: {one_line(str(error))}"
    if ours():
        with contextlib.suppress(FileExistsError), open(os.environ[REFUSAL_FILE], "x", encoding="utf-8") as file:
            file.write(line)
        return 2
    launched, local = "RANK" in os.environ and "WORLD_SIZE" in os.environ, os.environ.get("LOCAL_RANK", "0")
    first = not (launched and local.isdigit() and int(local))
    if launched:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if first:
        print(line, file=sys.stderr, flush=True)
    if meeting is not None:
        meeting.tell(one_line(str(error)))
    if not first:
        time.sleep(PATIENCE)
        print(line, file=sys.stderr)
    return 2


def refusal(wait: float = 0.0) -> str:
    """The line that a rank of ours has handed over, waited for so many seconds; empty if there is none."""
    path, deadline = Path(os.environ.get(REFUSAL_FILE, os.devnull)), time.monotonic() + wait
    while True:
        if path.is_file() and (line := path.read_text(encoding="utf-8")):
            return line
        if time.monotonic() >= deadline:
            return ""
        time.sleep(0.05)


def ours() -> bool:
    """True in a rank that our own launcher started."""
    return os.environ.get(LAUNCHER) == str(os.getppid()) and REFUSAL_FILE in os.environ


def clear(run_dir: Path) -> None:
    """Forgets the errors that ranks left in this folder before. Rank 0 does it before it tells the others the folder,
    so that it cannot remove a new one."""
    for path in run_dir.glob("crash-rank-*.txt"):
        path.unlink(missing_ok=True)


def leave(run_dir: Path, rank: int, error: Exception) -> None:
    """Writes this rank's error for rank 0 and the launcher, unless it only follows from another rank's."""
    if not lost_connection(error):
        what = "".join(traceback.format_exception_only(error)).strip()
        text = f"{what}\n\n{''.join(traceback.format_exception(error))}"
        with contextlib.suppress(OSError):  # a disk without room must not hide the error
            if not isinstance(error, ConfigError):  # for one rank 0 takes the folder away, perhaps before this
                run_dir.mkdir(parents=True, exist_ok=True)  # rank 0 makes it, perhaps a little later
            records.write_atomically(_file(run_dir, rank), text)


def cause(run_dir: Path, error: BaseException) -> BaseException:
    """What rank 0 reports: another rank's error where its own only follows from that, else its own.

    From here on neither SIGTERM, which the launcher sends when a rank has failed, nor Ctrl-C interrupts: the report is
    due.
    """
    signals.interrupt_no_more()
    if not isinstance(error, KeyboardInterrupt) and not lost_connection(error):
        return error
    # Our launcher's SIGTERM comes after the other rank's end, when its file is there; anyone else's means no file. With
    # another launcher a rank of this machine may have ended because of one elsewhere, whose file takes longer to show.
    deadline = time.monotonic() + PATIENCE
    while True:
        told = signals.asked_to_end() and LAUNCHER in os.environ
        last_look = told or isinstance(error, KeyboardInterrupt) or time.monotonic() >= deadline
        if (first := _first_left(run_dir)) is not None:
            break
        if last_look:
            return error
        time.sleep(0.1)
    rank, what = first
    if what.startswith(_REFUSED):
        return ConfigError(what.removeprefix(_REFUSED))
    return RankFailed(f"rank {rank} failed: {what} (its traceback: {_file(run_dir, rank).name})")


def was_stopped(run_dir: Path | None) -> bool:
    """True for a folder whose run ended by a signal, as rank 0 wrote it there."""
    return run_dir is not None and records.load_run(run_dir).crash.startswith("KeyboardInterrupt")


def tell(run_dir: Path | None, rank: int, what: str, killed: bool) -> None:
    """The launcher's last word: the rank that failed, why, and the report, which it writes if rank 0 could not.

    Args:
        run_dir: None if the ranks failed before they had one.
        rank: the first rank that ended with an error. Rank 0 ends late, because it writes the report.
        what: how it ended, as the launcher sees it: a signal or an exit status.
        killed: True if that was a signal and so no other rank's doing.
    """
    report = ""
    if run_dir is not None:
        crash = records.load_run(run_dir).crash
        stopped = crash.startswith("KeyboardInterrupt")  # what rank 0 takes the launcher's SIGTERM for
        first = _first_left(run_dir)
        if first is not None:
            rank, what = first
        elif crash and not stopped and not killed:
            rank, what = 0, crash.partition("\nAfter step ")[0]
        if not crash or stopped or (killed and first is None):
            with contextlib.suppress(OSError):
                records.write_atomically(run_dir / records.CRASH, f"rank {rank} failed: {what}\n\n{crash}")
                write_report(run_dir)
        report = f"; the run so far: {run_dir / records.REPORT}"
    print(f"error: rank {rank} failed: {one_line(what)}{report}", file=sys.stderr)


def _file(run_dir: Path, rank: int) -> Path:
    return run_dir / f"crash-rank-{rank}.txt"


def _first_left(run_dir: Path) -> tuple[int, str] | None:
    """The first error a rank left, and the rank."""
    for path in sorted(run_dir.glob("crash-rank-*.txt"), key=lambda path: path.stat().st_mtime_ns):
        rank = re.fullmatch(r"crash-rank-(\d+)\.txt", path.name)
        if rank:
            return int(rank[1]), path.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    return None


def lost_connection(error: BaseException) -> bool:
    """True for the error of a collective whose other side is gone or silent; gloo has no class of its own for it."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
