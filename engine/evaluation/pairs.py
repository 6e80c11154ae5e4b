"""Rows that a judge puts in order: pairs, lists of responses, and files that ``engine.generate`` has written.

Imports no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from engine.config import ConfigError, Data
from engine.data import row_files
from engine.data.file_formats import Row
from engine.data.templates import PromptError
from engine.data.training_rows import split_pair
from engine.evaluation.response_files import OWN
from engine.evaluation.settings import Relabel

ADDED = ("chosen_score", "rejected_score", "score_margin", "swapped")
"""Columns that are written besides the pair; those of these names in the data are replaced."""
GENERATED = {"row", "sample", "response", "response_ids", "raw_prompt"}
"""Columns by which a file of ``engine.generate`` is known."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """A prompt and the answers among which a judge chooses, each a string or messages."""

    place: str
    """Where they stand, for messages."""
    prompt: Any
    answers: list[Any]
    """At least two, all different. Of a pair the chosen one, then the rejected one."""
    columns: dict[str, Any]
    """All else that the row has."""
    pair: tuple[Any, Any] | None = None
    """A pair's columns as they stand in the data, where an answer may hold its prompt."""
    has_prompt: bool = True
    """False where the row has no prompt of its own."""

    def row(self, best: int, worst: int, scores: list[float]) -> dict[str, Any]:
        """What the output has of two of the answers: the pair, both scores, what lies between them."""
        chosen, rejected = ((self.pair or self.answers)[place] for place in (best, worst))
        row = {"prompt": self.prompt} if self.has_prompt else {}
        row |= {"chosen": chosen, "rejected": rejected}
        row |= {"chosen_score": scores[best], "rejected_score": scores[worst]}
        row["score_margin"] = scores[best] - scores[worst]
        if self.pair is not None:
            row["swapped"] = best > worst
        return row | self.columns


def read(given: Relabel) -> tuple[list[Candidates], int]:
    """The candidates of a data set, and how many prompts have fewer than two different answers.

    Raises:
        ConfigError: unreadable, of none of the three forms, or a row that cannot be used; names file and row.
    """
    data, rows = given.data, list(_rows(given.data))
    if not rows:
        raise ConfigError(f"{data.path} has no rows")
    columns = rows[0].columns.keys()
    found: Iterator[Candidates]
    if columns >= GENERATED:
        found = _generated(rows)
    elif data.chosen_column in columns or data.rejected_column in columns:
        found = (_pair(row, data) for row in rows)
    elif given.responses_column in columns:
        found = (_listed(row, data, given.responses_column) for row in rows)
    else:
        raise ConfigError(
            f"{rows[0].source} holds nothing to relabel: neither '{data.chosen_column}' and '{data.rejected_column}' "
            f"(data.chosen_column, data.rejected_column) nor '{given.responses_column}' (responses_column), and it is "
            f"no file of engine.generate; its columns are {', '.join(columns)}"
        )
    chosen = list(itertools.islice(found, given.limit))
    usable = [one for one in chosen if len(one.answers) > 1]
    if not usable:
        raise ConfigError(f"{rows[0].source}: there are no two different answers to one prompt")
    return usable, len(chosen) - len(usable)


def _rows(data: Data) -> Iterator[Row]:
    if data.task is None:
        assert data.path is not None
        return row_files.locate("data.path", data.path, data.name, data.split).rows()
    from engine.tasks import addition

    place = f"data.task {data.task}"
    return (Row(place, i, None, row) for i, row in enumerate(addition.preferences("train")))


def _pair(row: Row, data: Data) -> Candidates:
    try:
        prompt, *answers = split_pair(row.columns, data)
    except PromptError as error:
        raise ConfigError(f"{row.place}: {error}") from error
    pair = (row.columns[data.chosen_column], row.columns[data.rejected_column])
    names = (data.prompt_column, data.chosen_column, data.rejected_column)
    has_prompt = row.columns.get(data.prompt_column) is not None
    return Candidates(row.place, prompt, answers, _others(row, *names), pair, has_prompt)


def _listed(row: Row, data: Data, column: str) -> Candidates:
    """A row with a list of responses."""
    for name in (data.prompt_column, column):
        if row.columns.get(name) is None:
            raise ConfigError(f"{row.place}: the row has no column '{name}' with something in it")
    answers = row.columns[column]
    if not isinstance(answers, list):
        raise ConfigError(f"{row.place}, column '{column}': it must be a list of responses, not {answers!r:.80}")
    others = _others(row, data.prompt_column, column)
    return Candidates(row.place, row.columns[data.prompt_column], _different(answers), others)


def _generated(rows: list[Row]) -> Iterator[Candidates]:
    """The prompts of a file of ``engine.generate``, whose rows are a response each."""
    for _, group in itertools.groupby(rows, key=lambda row: row.columns["row"]):
        first, *rest = group
        answers = _different([row.columns["response"] for row in (first, *rest)])
        others = _others(first, *OWN)
        yield Candidates(first.place, first.columns["raw_prompt"], answers, others)


def _different(answers: list[Any]) -> list[Any]:
    """Without those that are empty, which nothing can be learned from, and those that are there already."""
    return [one for place, one in enumerate(answers) if one and one not in answers[:place]]


def _others(row: Row, *names: str) -> dict[str, Any]:
    taken = {*names, *ADDED, "prompt", "chosen", "rejected"}
    return {name: value for name, value in row.columns.items() if name not in taken}
