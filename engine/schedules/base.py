"""When a run generates and when it trains, as a training rank sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from engine.generation.equal_weights import LogprobProof
from engine.memory.planning import MemoryPlan
from engine.rollouts.source import Batch
from engine.sample import Sample
from engine.training.trainer import Trainer


class Schedule(ABC):
    """A trainer and whatever samples for it, as the settings of ``schedule`` arrange them.

    Every method is collective over the training ranks.
    """

    trainer: Trainer
    plan: MemoryPlan
    phase = "wait"
    """What ``sample`` takes the trainer's time for."""

    @abstractmethod
    def sample(self, step: int) -> Batch:
        """This rank's share of the batch to train on in ``step``, from a policy at most ``schedule.staleness`` updates
        old."""

    def reference_logprobs(self, samples: Sequence[Sample]) -> Tensor | None:
        """[T] log-probabilities of the samples by the frozen reference, in nats; None if the run has none."""
        return self.trainer.reference_logprobs(samples)

    def rest(self) -> None:  # noqa: B027  a sampler on devices of its own is in nobody's way
        """The sampler gives up its memory."""

    def take_back(self) -> None:  # noqa: B027
        """The optimizer states come back, where the plan has them moved."""

    def make_room(self) -> None:  # noqa: B027
        """The optimizer states go to host memory, where the plan has them moved."""

    @abstractmethod
    def hand_over(self, version: int) -> None:
        """The trainer's weights, after ``version`` updates, are the ones to sample from next."""

    @abstractmethod
    def held_out(self) -> list[Sample]:
        """This rank's share of the responses to the held-out prompts, by the newest weights."""

    def in_flight(self, wait: bool = True) -> list[Batch]:
        """Batches that are sampled and not yet trained on; this rank's part of them.

        Args:
            wait: for one in progress on other ranks; one that a thread of this rank draws is always waited for.
        """
        return []

    @abstractmethod
    def resume(self, batches: Sequence[Batch], step: int, cursor: int) -> None:
        """Goes on from a checkpoint before ``step``: with what was in flight, or else the prompts after ``cursor``."""

    @abstractmethod
    def metrics(self, step_seconds: float, waited: float) -> dict[str, float]:
        """Of the last step, which took so long and in which the trainer waited so long for its batch."""

    @abstractmethod
    def close(self) -> None:
        """Ends the sampler, before the process group ends."""

    def _logprobs(self, proof: LogprobProof) -> np.ndarray:
        """[T] log-probabilities of the proof's responses by the trainer's weights as they are now. Collective."""
        return self.trainer.logprobs(self.trainer.policy, proof.samples, temperature=1.0).numpy()
