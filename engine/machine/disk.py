"""Writing to a disk that may be full: what is torn goes, and one line says why. Imports no torch."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

GIB = 2**30
FULL = (errno.ENOSPC, errno.EDQUOT)
"""What the system says where room is what a file lacks."""
ENDING = 22
"""Bytes of the record that ends a zip file, which is what PyTorch writes."""
RESUME = "go on with --resume"
_UNNAMED = re.compile(r"PytorchStreamWriter|inline_container|file write failed|unexpected pos \d+")
"""PyTorch's writer of zip files does not say what the system said."""


class WriteFailed(Exception):
    """A file of the run could not be written; the message is one line."""


@contextlib.contextmanager
def writing(what: Path, tidy: Callable[[], None] | None = None, then: str = RESUME) -> Iterator[None]:
    """Turns the errors of writing into ``WriteFailed``; ``tidy`` takes away what is torn, whatever ended it.

    Args:
        then: what to do when there is room again, for the message.

    Raises:
        WriteFailed: names ``what``, the system's reason and the room that was left before anything was removed.
    """
    try:
        yield
    except BaseException as error:
        free = free_bytes(what)
        reason = _reason(error, free)
        advice = "make room" if reason in [os.strerror(code) for code in FULL] else "see to that"
        if tidy is not None:
            with contextlib.suppress(OSError):
                tidy()
        if reason is None:
            raise
        raise WriteFailed(
            f"{what} could not be written: {reason} ({free / GIB:.3g} GiB were free): {advice}, then {then}"
        ) from error


def _reason(error: BaseException, free: int) -> str | None:
    """The system's words for why a write failed, or None for an error of another kind."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    for cause in chain:
        if isinstance(cause, OSError) and cause.errno and not isinstance(cause, (ConnectionError, TimeoutError)):
            return os.strerror(cause.errno)
        if isinstance(cause, Exception) and (code := re.search(r"\(os error (\d+)\)", str(cause))):  # safetensors'
            return os.strerror(int(code[1]))
    if any(isinstance(cause, RuntimeError) and _UNNAMED.search(str(cause)) for cause in chain):
        return os.strerror(errno.ENOSPC) if free < GIB else "the system did not say why"
    return None


def remove(folder: Path) -> None:
    """Removes a folder that could not be written to the end, and at once its bytes.

    A file that is removed while it is open keeps them, and the error that is on its way holds the writer's file open.
    Nothing behind a link is touched: no link is followed, and a file that has a second name keeps its bytes.
    """
    if not folder.is_symlink():
        for directory, _, names in os.walk(folder):
            for name in names:
                empty(Path(directory, name))
    clear(folder)


def empty(file: Path) -> None:
    """Gives a file's bytes back, if nothing else has a part in them."""
    with contextlib.suppress(OSError):
        status = file.lstat()
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            os.truncate(file, 0)


def clear(path: Path) -> None:
    """Removes what has this name, if anything: a folder and what is in it, a file, or a link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def flush(*places: Path) -> None:
    """Waits until the disk has these files, and the names in these folders: only then does a power cut leave them."""
    for place in places:
        opened = os.open(place, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def holds_zeros(file: Path) -> bool:
    """True where a file's last bytes are zeros, as a power cut leaves a file that has its size and no content yet."""
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - ENDING))
        ending = opened.read(ENDING)
    return bool(ending) and not any(ending)


def free_bytes(path: Path) -> int:
    """Free bytes for this user on the disk of ``path``, or of its nearest parent that exists."""
    for place in (path, *path.absolute().parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(place).free
    return 0


def used_bytes(folder: Path) -> int:
    """Bytes of all files below a folder that may not exist."""
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(directory, name)).st_size
    return total


def probe(key: str, folder: Path) -> None:
    """Makes sure that a file can be made in ``folder``, by making one; leaves nothing behind.

    Permissions do not tell: root has all of them, also on a read-only file system.

    Raises:
        ConfigError: names the setting ``key``.
    """
    with trial_file(key, folder):
        pass


@contextlib.contextmanager
def trial_file(key: str, folder: Path) -> Iterator[Path]:
    """A file in ``folder`` for as long as the block runs; the folder is made, and removed again if it is empty then.

    Raises:
        ConfigError: names the setting ``key``.
    """
    import tempfile

    from engine.config import ConfigError

    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_folders(folder))
            file = stack.enter_context(tempfile.NamedTemporaryFile(dir=folder, prefix=".tandem-"))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"{key}: cannot write to {folder}: {reason}") from None
        yield folder / Path(file.name).name  # as the folder is named, also where that depends on where one is


@contextlib.contextmanager
def _folders(folder: Path) -> Iterator[None]:
    """Makes a folder and its parents, as far as they are missing, for as long as the block runs."""
    made: list[Path] = []
    try:
        missing = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
        for place in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another run that starts at the same moment
                place.mkdir()
                made.append(place)
        yield
    finally:
        for place in reversed(made):
            with contextlib.suppress(OSError):
                place.rmdir()
