"""The data sets of a run, one or a mixture of several, and which of their rows are held out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.config import ConfigError, Data
from engine.data import row_files
from engine.data.file_formats import Row
from engine.data.row_files import Origin

COLUMNS = ("prompt_column", "completion_column", "messages_column", "chosen_column", "rejected_column")
"""Settings that name columns, of the run and of each source of a mixture."""


@dataclass(frozen=True, slots=True)
class Source:
    """A data set of the run, or a part of one; its columns have the run's names."""

    origin: Origin
    data: Data
    weight: float = 1.0
    names: Mapping[str, str] = field(default_factory=dict)
    """The run's name of a column, by the setting in ``data.mixture`` that gives the source's own."""
    held_out: bool | None = None
    """Only the rows that ``data.eval_fraction`` holds out, or only the others; None: all."""

    @property
    def name(self) -> str:
        """For messages."""
        path = self.origin.path
        if self.held_out is not None:
            return f"{path}, data.eval_fraction {self.data.eval_fraction}"
        return path if self.origin.split == "train" else f"{path}, split {self.origin.split}"

    def rows(self) -> Iterator[Row]:
        """Raises ``ConfigError`` for what cannot be read, and for a column that is not there."""
        for row in self.origin.rows():
            renamed = row._replace(columns=self._renamed(row))
            if self.held_out is None or is_held_out(renamed, self.data) == self.held_out:
                yield renamed

    def _renamed(self, row: Row) -> dict[str, Any]:
        columns = dict(row.columns)
        for setting, own in self.names.items():
            wanted = getattr(self.data, setting)
            if own not in row.columns:
                raise ConfigError(f"{row.place}: there is no column '{own}' ({setting} in data.mixture)")
            if wanted in row.columns and wanted not in self.names.values():
                raise ConfigError(
                    f"{row.place}: the column '{own}' ({setting} in data.mixture) would become '{wanted}' "
                    f"(data.{setting}), which is another column of that source: rename it"
                )
            columns.pop(own, None)
        return columns | {getattr(self.data, setting): row.columns[own] for setting, own in self.names.items()}


def training(data: Data) -> list[Source]:
    """Where rows to train on come from: ``data.path``, or all sources of ``data.mixture``.

    Raises:
        ConfigError: nothing can be read there.
    """
    held_out = None if data.eval_fraction is None else False
    if not data.mixture:
        assert data.path is not None
        return [Source(row_files.locate("data.path", data.path, data.name, data.split), data, held_out=held_out)]
    found = []
    for number, one in enumerate(data.mixture):
        origin = row_files.locate(f"data.mixture.{number}.path", one.path, one.name, one.split)
        own = {key: getattr(one, key) for key in COLUMNS}
        names = {key: name for key, name in own.items() if name not in (None, getattr(data, key))}
        found.append(Source(origin, data, one.weight, names, held_out))
    return found


def held_out(data: Data) -> list[Source]:
    """Where held-out rows come from; nothing where there are none.

    Raises:
        ConfigError: nothing can be read there.
    """
    if data.eval_fraction is not None:
        return [Source(one.origin, data, one.weight, one.names, True) for one in training(data)]
    if data.eval_path is not None:
        split = data.eval_split or data.split
        return [Source(row_files.locate("data.eval_path", data.eval_path, data.eval_name, split), data)]
    if data.eval_split is not None:
        assert data.path is not None
        return [Source(row_files.locate("data.path", data.path, data.name, data.eval_split), data)]
    return []


def in_turns(sources: Iterable[Source]) -> Iterator[Row]:
    """The rows of several sources: the first of each, the second of each, and so on."""
    left = [source.rows() for source in sources]
    while left:
        for rows in list(left):
            try:
                yield next(rows)
            except StopIteration:
                left.remove(rows)


def is_held_out(row: Row, data: Data) -> bool:
    """True for a row that ``data.eval_fraction`` holds out: a SHA-256 of its prompt, as a number, is below that share.

    It depends on nothing else: not on the seed, on the row's place or on other rows.

    Raises:
        ConfigError: the row has nothing that could be its prompt.
    """
    asked = _asked(row.columns, data)
    if asked is None:
        raise ConfigError(f"{row.place}: there is no prompt in it by which data.eval_fraction could split")
    text = json.dumps(asked, sort_keys=True, default=str)
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    assert data.eval_fraction is not None
    return number < data.eval_fraction * 2**64


def _asked(columns: Mapping[str, Any], data: Data) -> Any:
    """What a row asks, the same for all rows whose prompts are equal.

    Of a conversation that is what comes before the assistant first speaks: conversations that only later differ have
    turns of the assistant in common.
    """
    if (prompt := columns.get(data.prompt_column)) is not None:
        return prompt
    if isinstance(messages := columns.get(data.messages_column), list):
        return _opening(messages)
    chosen, rejected = columns.get(data.chosen_column), columns.get(data.rejected_column)
    if isinstance(chosen, list):
        return _opening(chosen)
    if isinstance(chosen, str) and isinstance(rejected, str):
        pairs = enumerate(zip(chosen, rejected, strict=False))
        end = next((place for place, (one, other) in pairs if one != other), min(len(chosen), len(rejected)))
        return chosen[:end].rstrip()
    return None


def _opening(messages: list[Any]) -> list[Any]:
    roles = [one.get("role") if isinstance(one, dict) else None for one in messages]
    return messages[: roles.index("assistant")] if "assistant" in roles else messages


def why_empty(data: Data, kind: str) -> str:
    """Why the ``"training"`` or the ``"held-out"`` rows are none, where none of them was dropped."""
    if data.eval_fraction is None:
        return "it has no rows"
    if kind == "held-out":
        return "it has no prompt whose hash is below that share: raise it"
    return "all its prompts are held out: lower it"
