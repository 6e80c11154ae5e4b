"""Standard output that cannot end a run."""

import os
from contextlib import suppress
from typing import TextIO


class Output:
    """A stream to print to that falls silent once printing fails: a closed pipe, a full disk, no stream at all.

    Training goes on where nobody reads along (``| head``, ``>&-``, a terminal that went away). Characters that the
    stream's encoding lacks become question marks.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:
        """The stream's encoding."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether a person may be watching."""
        with suppress(OSError, ValueError):  # ValueError: the stream is closed
            return self._stream is not None and self._stream.isatty()
        return False

    def write(self, text: str) -> int:
        """Write ``text``, or drop it where that fails."""
        stream = self._stream
        if stream is not None:
            try:
                stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
            except (OSError, ValueError):
                self._fall_silent(stream)
        return len(text)

    def flush(self) -> None:
        """Send what was written; most failures show only here."""
        stream = self._stream
        if stream is not None:
            try:
                stream.flush()
            except (OSError, ValueError):
                self._fall_silent(stream)

    def line(self, text: str) -> None:
        """Write ``text`` and a line's end, at once."""
        self.write(text + "\n")
        self.flush()

    def _fall_silent(self, stream: TextIO) -> None:
        """Write no more, and let nobody else fail: the stream's descriptor leads nowhere from here on.

        Libraries print to the same stream; and what it still holds would fail once more when the interpreter exits,
        which makes the exit status 120.
        """
        self._stream = None
        with suppress(OSError, ValueError):
            descriptor = stream.fileno()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
