"""Batches of a data set's rows, in the place of what a sampler draws."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine.config import Config
from engine.data import stream
from engine.data.training_rows import Unit
from engine.rollouts.source import Batch
from engine.sample import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RowSource:
    """The rows of a run, for one of ``size`` ranks that share them."""

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        rows: Sequence[Unit],
        held_out: Sequence[Unit],
        *,
        rank: int,
        size: int,
    ) -> None:
        self._config, self._tokenizer, self.held_out_rows = config, tokenizer, held_out
        self._rank, self._size = rank, size
        self._stream = stream.over(rows, config.seed, config.data.shuffle)

    def epochs(self, cursor: int) -> float:
        """Passes over the data when so many rows have been taken."""
        return self._stream.epochs(cursor)

    def batch(self, step: int, cursor: int) -> Batch:
        """This rank's share of the batch of a step, from the rows after ``cursor``."""
        started = time.perf_counter()
        self._stream.cursor = cursor
        units = self._stream.take(self._config.train.rows_per_step)
        share = len(units) // self._size
        samples = self._samples(units[self._rank * share : (self._rank + 1) * share], self._rank * share)
        return Batch(step, samples, cursor, self._stream.cursor, time.perf_counter() - started)

    def ahead(self, cursor: int, steps: int) -> list[Unit]:
        """The rows of so many batches after ``cursor``, of all ranks, each once."""
        self._stream.cursor = cursor
        return self._stream.ahead(steps * self._config.train.rows_per_step)

    def columns(self, position: int) -> dict[str, Any]:
        """Nothing: sequences to train on are whole without the row they came from."""
        return {}

    def held_out(self) -> list[Sample]:
        """This rank's share of the held-out rows."""
        start, end = (len(self.held_out_rows) * rank // self._size for rank in (self._rank, self._rank + 1))
        return self._samples(self.held_out_rows[start:end], start)

    def _samples(self, units: Sequence[Unit], first: int) -> list[Sample]:
        """Their sequences, a group a row, with their places in the whole batch and their text to look at."""
        return [
            dataclasses.replace(
                one,
                index=(first + number) * len(unit) + place,
                group_id=first + number,
                response_text=str(self._tokenizer.decode(one.response_ids, skip_special_tokens=True)),
            )
            for number, unit in enumerate(units)
            for place, one in enumerate(unit)
        ]
