"""Training on the rows of a data set: there is no sampler, and nobody to make room for or to hand weights to.

What the frozen reference says of a row is computed once, before the first batch, for all rows that the run will take.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.data.training_rows import Unit
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
        self._kept = False

    def sample(self, step: int) -> Batch:
        if not self._kept:
            self._keep_reference(self._source.ahead(self._cursor, self.trainer.config.train.steps - step))
            self._kept = True
        batch = self._source.batch(step, self._cursor)
        self._cursor = batch.cursor
        return batch

    def hand_over(self, version: int) -> None:
        """Nobody samples from the weights."""

    def held_out(self) -> list[Sample]:
        self._keep_reference(self._source.held_out_rows)
        return self._source.held_out()

    def reference_logprobs(self, samples: Sequence[Sample]) -> Tensor | None:
        kept = [torch.from_numpy(one.ref_logprobs) for one in samples if one.ref_logprobs is not None]
        if not self.trainer.config.has_reference:
            return None
        return torch.cat(kept) if kept else torch.empty(0)

    def _keep_reference(self, units: Sequence[Unit]) -> None:
        """Has each row keep its log-probabilities by the frozen reference, if the run has one.

        A rank computes its share and all get all: in another epoch a row is another rank's.
        """
        world = self.trainer.world
        missing = [one for unit in units for one in unit if one.ref_logprobs is None]
        if not missing or not self.trainer.config.has_reference:
            return
        start, end = (len(missing) * rank // world.size for rank in (world.rank, world.rank + 1))
        logprobs = self.trainer.reference_logprobs(missing[start:end])
        assert logprobs is not None
        parts = logprobs.split([one.loss_tokens for one in missing[start:end]])
        gathered = [part for rank in world.gather([part.numpy() for part in parts]) for part in rank]
        for one, part in zip(missing, gathered, strict=True):
            one.ref_logprobs = part

    def resume(self, batches: Sequence[Batch], step: int, cursor: int) -> None:
        self._cursor = cursor

    def metrics(self, step_seconds: float, waited: float) -> dict[str, float]:
        """None of its own."""
        return {}

    def close(self) -> None:
        """There is no sampler to end."""
