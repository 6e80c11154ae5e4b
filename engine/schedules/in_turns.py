"""Generation and training on the same devices, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from engine.rollouts.source import Batch, Source
from engine.sample import Sample
from engine.schedules.base import Turns
from engine.schedules.colocation import Colocation


class Alternating(Turns):
    """On the same devices, one after the other: every batch is drawn from the newest weights."""

    phase = "generate"

    def __init__(self, pair: Colocation, source: Source) -> None:
        self._pair, self._source, self._cursor = pair, source, 0
        self.trainer, self.plan = pair.trainer, pair.plan

    def sample(self, step: int) -> Batch:
        batch = self._source.batch(self._pair.generator, step, self._cursor)
        self._cursor = batch.cursor
        return batch

    def rest(self) -> None:
        self._pair.rest()

    def take_back(self) -> None:
        self._pair.take_back()

    def make_room(self) -> None:
        self._pair.make_room()

    def hand_over(self, version: int) -> None:
        self._pair.hand_over(version)

    def held_out(self) -> list[Sample]:
        return self._source.held_out(self._pair.generator)

    def resume(self, batches: Sequence[Batch], step: int, cursor: int) -> None:
        self._cursor = cursor

    def metrics(self, step_seconds: float, waited: float) -> dict[str, float]:
        return self._pair.metrics

    def close(self) -> None:
        self._pair.generator.close()
