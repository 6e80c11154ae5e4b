"""Rows of files by their formats: JSON lines, JSON arrays, Parquet, and what ``save_to_disk`` of ``datasets`` wrote."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from typing import IO, Any, NamedTuple, cast

from engine.config import ConfigError
from engine.config.quoted import kind_and_words

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
"""Of the files that are read, in lower or upper case."""


class Row(NamedTuple):
    """A row of a data set and where it stands, for messages."""

    source: str
    number: int
    """Counted from 0."""
    line: int | None
    """Counted from 1, in a file of JSON lines."""
    columns: dict[str, Any]

    @property
    def place(self) -> str:
        """In words."""
        return _place(self.source, self.number, self.line)


def _place(source: str, number: int, line: int | None = None) -> str:
    if line is None:
        return f"{source} row {number} (counted from 0)"
    return f"{source} line {line} (row {number} counted from 0)"


def file_rows(path: str) -> Iterator[Row]:
    """The rows of a file with one of ``SUFFIXES``.

    Raises:
        ConfigError: unreadable, or a row that is none; names the file and the row or line.
    """
    name = path.lower()
    if name.endswith(".parquet"):
        return _parquet_rows(path)
    is_array = name.removesuffix(".gz").endswith(".json") and _first_character(path) == b"["
    return _array_rows(path) if is_array else _line_rows(path)


def saved_rows(folder: str) -> Iterator[Row]:
    """The rows of a folder that ``Dataset.save_to_disk`` wrote; raises ``ConfigError`` likewise."""
    try:
        import datasets

        for number, columns in enumerate(datasets.load_from_disk(folder)):
            yield Row(folder, number, None, dict(columns))
    except Exception as error:  # whatever the package says
        raise ConfigError(f"{folder} cannot be read: {kind_and_words(error)}") from error


def _opened(path: str) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "rb")) if path.lower().endswith(".gz") else open(path, "rb")


def _unreadable(path: str, error: Exception) -> ConfigError:
    said = error.strerror if isinstance(error, OSError) and error.strerror else kind_and_words(error)
    return ConfigError(f"{path} cannot be read: {said}")


BROKEN = (OSError, EOFError, zlib.error)
"""What reading bytes raises, of a gzip file that is torn or none as well."""


def _first_character(path: str) -> bytes:
    """The first byte that is neither a space, a line end nor part of a byte order mark."""
    try:
        with _opened(path) as file:
            while part := file.read(4096):
                if text := part.lstrip(b"\xef\xbb\xbf \t\r\n"):
                    return text[:1]
    except BROKEN as error:
        raise _unreadable(path, error) from None
    return b""


def _line_rows(path: str) -> Iterator[Row]:
    number = 0
    try:
        with _opened(path) as file:  # lines end at \n alone: JSON strings may hold other line separators
            for line, content in enumerate(file, 1):
                try:
                    text = content.decode("utf-8-sig" if line == 1 else "utf-8")
                    if not text.strip():
                        continue
                    columns = json.loads(text, object_pairs_hook=_object)
                except (ValueError, RecursionError) as error:
                    raise ConfigError(f"{path} line {line} cannot be read: {kind_and_words(error)}") from None
                if not isinstance(columns, dict):
                    raise ConfigError(f"{path} line {line} must be an object with columns, not {columns!r:.80}")
                yield Row(path, number, line, columns)
                number += 1
    except BROKEN as error:
        raise _unreadable(path, error) from None


def _array_rows(path: str) -> Iterator[Row]:
    """One array of objects; each is read by itself, so that a fault has a row."""
    try:
        with _opened(path) as file:
            text = file.read().decode("utf-8-sig")
    except (*BROKEN, ValueError) as error:
        raise _unreadable(path, error) from None
    decoder = json.JSONDecoder(object_pairs_hook=_object)
    place, number = _behind_blanks(text, text.index("[") + 1), 0
    while text[place : place + 1] != "]":
        try:
            columns, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{_place(path, number)} cannot be read: {kind_and_words(error)}") from None
        if not isinstance(columns, dict):
            raise ConfigError(f"{_place(path, number)} must be an object with columns, not {columns!r:.80}")
        yield Row(path, number, None, columns)
        number += 1
        place = _behind_blanks(text, place)
        if text[place : place + 1] not in (",", "]"):
            raise ConfigError(f"{path} cannot be read: neither , nor ] behind row {number - 1} (counted from 0)")
        if text[place] == ",":
            place = _behind_blanks(text, place + 1)
    if rest := text[place + 1 :].strip():
        raise ConfigError(f"{path} cannot be read: its array is followed by {rest!r:.80}")


def _behind_blanks(text: str, place: int) -> int:
    while text[place : place + 1] in (" ", "\t", "\r", "\n"):
        place += 1
    return place


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of a key that comes twice JSON's reader would silently take the last."""
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key '{next(key for key in keys if keys.count(key) > 1)}' comes twice in one object")
    return content


def _parquet_rows(path: str) -> Iterator[Row]:
    try:
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(path) as file:  # of this one file: no columns from the names of its folders
            names = file.schema_arrow.names
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"the column '{twice[0]}' comes twice")
            number = 0
            for batch in file.iter_batches():
                for columns in batch.to_pylist():
                    yield Row(path, number, None, columns)
                    number += 1
    except Exception as error:  # whatever the reader of that format says
        raise ConfigError(f"{path} cannot be read: {kind_and_words(error)}") from error
