"""Training on the rows of a data set: there is no sampler, and nobody to make room for or to hand weights to."""

from __future__ import annotations

from collections.abc import Sequence

from engine.memory.planning import MemoryPlan
from engine.rollouts.row_source import RowSource
from engine.rollouts.source import Batch
from engine.sample import Sample
from engine.schedules.base import Schedule
from engine.training.trainer import Trainer


class Rows(Schedule):
    """A trainer and its rows.

    Args:
        trainer: is all that lives on the devices.
        plan: the memory plan of that.
        source: batches of rows.
    """

    def __init__(self, trainer: Trainer, plan: MemoryPlan, source: RowSource) -> None:
        self.trainer, self.plan = trainer, plan
        self._source, self._cursor = source, 0

    def sample(self, step: int) -> Batch:
        batch = self._source.batch(step, self._cursor)
        self._cursor = batch.cursor
        return batch

    def hand_over(self, version: int) -> None:
        """Nobody samples from the weights."""

    def held_out(self) -> list[Sample]:
        return self._source.held_out()

    def resume(self, batches: Sequence[Batch], step: int, cursor: int) -> None:
        self._cursor = cursor

    def metrics(self, step_seconds: float, waited: float) -> dict[str, float]:
        """None of its own."""
        return {}

    def close(self) -> None:
        """There is no sampler to end."""
