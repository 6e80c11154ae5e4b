"""Files of responses: rows added a chunk at a time under another name, which become one whole .jsonl or .parquet file.

Imports no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine.config import ConfigError
from engine.machine import disk
from engine.report import records

SUFFIXES = (".jsonl", ".parquet")
OWN = ("row", "sample", "prompt", "response", "prompt_ids", "response_ids", "logprobs", "finish_reason", "raw_prompt")
"""Columns that a file of responses has besides those of the data."""
ROWS_AT_A_TIME = 1000
Rows = list[dict[str, Any]]


class Unfinished:
    """The rows of an output that is not whole yet; a command that was killed goes on from them.

    The file is ``partial-NAME`` beside the output. Its first line says what the rows are made by, so that rows of other
    settings are never mixed with them. A chunk's rows are written at once, and one that is torn is made again.

    Args:
        made_by: what the rows depend on, as JSON has it.
        what: the rows, in words.

    Raises:
        ConfigError: there are rows already that something else has made.
    """

    def __init__(self, output: Path, made_by: dict[str, Any], what: str = "responses") -> None:
        self.output, self.path = output, output.with_name(f"partial-{output.name}")
        self._what = what
        self._header = records.json_line({"made_by": made_by}) + "\n"
        self.rows = 0
        """Those that are whole."""
        self._end = 0
        with disk.writing(self.path, then="start again"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                self._look(made_by)
            if not self._end:
                self.path.write_text(self._header, encoding="utf-8")
                self._end = self.path.stat().st_size

    def _look(self, made_by: dict[str, Any]) -> None:
        """Counts what is there; what ends in its first line, or was made otherwise without a row, is begun anew."""
        with self.path.open("rb") as file:
            first = file.readline()
            if not first.endswith(b"\n"):
                return
            before = json.loads(first)["made_by"]
            if other := [key for key in made_by | before if made_by.get(key) != before.get(key)]:
                if not file.readline().endswith(b"\n"):
                    return
                key = other[0]
                raise ConfigError(
                    f"{self.path} holds {self._what} made with {key} {before.get(key)}, and now it is "
                    f"{made_by.get(key)}: remove it, or give another --output"
                )
            self._end = file.tell()
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._end += len(line)
                self.rows += 1

    def cut(self, rows: int) -> None:
        """Keeps the first so many rows."""
        with self.path.open("rb+") as file:
            for _ in range(1 + rows):
                file.readline()
            self._end, self.rows = file.tell(), rows
            file.truncate()

    def add(self, rows: Rows) -> None:
        """Writes rows, and waits until the disk has them."""
        text = "".join(records.json_line(row) + "\n" for row in rows)
        with disk.writing(self.path, then="start again"), self.path.open("rb+") as file:
            file.seek(self._end)
            file.write(text.encode("utf-8", "backslashreplace"))
            file.flush()
            os.fsync(file.fileno())
            self._end = file.tell()
        self.rows += len(rows)

    def finish(self, kept: Callable[[dict[str, Any]], dict[str, Any] | None] | None = None) -> None:
        """Gives the output its name, with all rows in it.

        Args:
            kept: what the output has of a row; None leaves the row out. Default: every row as it is.

        Raises:
            ConfigError: a .parquet file cannot hold them; they stay in the partial file.
        """
        temporary = self.output.with_name(f".{self.output.name}.tmp")
        with disk.writing(self.output, lambda: disk.clear(temporary), then="start again"):
            rows = (row for each in self.read() if (row := kept(each) if kept else each) is not None)
            if self.output.suffix == ".parquet":
                _write_parquet(list(rows), temporary)
            else:
                with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
                    for row in rows:
                        file.write(records.json_line(row) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, self.output)
            self.path.unlink()

    def read(self) -> Iterator[dict[str, Any]]:
        """The rows that are there."""
        with self.path.open(encoding="utf-8") as file:
            file.readline()
            for line in file:
                yield json.loads(line)


def read(path: Path) -> Rows:
    """All rows of a file that ``Unfinished`` has written."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        rows: Rows = pyarrow.parquet.read_table(path).to_pylist()
        return rows
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def check_parquet(rows: Rows) -> None:
    """Raises ConfigError for columns that a .parquet file cannot hold, such as one of numbers and texts."""
    _schema(rows)


def _schema(rows: Rows) -> Any:
    import pyarrow

    try:
        schemas = [pyarrow.Table.from_pylist(part).schema for part in _parts(rows)]
        return pyarrow.unify_schemas(schemas, promote_options="permissive")
    except pyarrow.ArrowException as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"a .parquet file cannot hold the data's columns ({said:.200}): take .jsonl") from error


def _parts(rows: Rows) -> Iterator[Rows]:
    for start in range(0, len(rows), ROWS_AT_A_TIME):
        yield rows[start : start + ROWS_AT_A_TIME]


def _write_parquet(rows: Rows, path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    schema = _schema(rows)
    with pyarrow.parquet.ParquetWriter(path, schema) as file:
        for part in _parts(rows):
            file.write_table(pyarrow.Table.from_pylist(part, schema))
