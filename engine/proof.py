"""Texts by which sampler and trainer prove that they hold the same weights, whatever the samples are drawn from.

Where samples are as old as the trainer's weights, their own log-probabilities are the proof. A sampler that runs ahead
never gives such samples; it is asked for the log-probabilities of a few fixed responses after every hand-over instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.generation.base import Text
from engine.sample import Sample
from engine.training.trainer import Trainer, WeightsDisagreeError


class Proof:
    """Some prompts and the sampler's first greedy responses to them."""

    def __init__(self, prompts: Sequence[list[int]], responses: Sequence[list[int]], limit: float) -> None:
        self.texts: list[Text] = list(zip(prompts, responses, strict=True))
        self._limit = limit
        self._samples = [Sample(i, i, prompt, response_ids=answer) for i, (prompt, answer) in enumerate(self.texts)]

    def expected(self, trainer: Trainer) -> np.ndarray:
        """[T] log-probabilities by the trainer's weights as they are now, at temperature 1. Collective."""
        return trainer.logprobs(trainer.policy, self._samples, temperature=1.0).numpy()

    def check(self, expected: np.ndarray, found: Sequence[np.ndarray], version: int) -> dict[str, float]:
        """Compares with the sampler's; gives the metrics.

        Raises:
            WeightsDisagreeError: the mean difference is above ``generation.max_logprob_gap``.
        """
        gap = np.abs(np.concatenate(found) - expected)
        if not gap.mean() <= self._limit:
            raise WeightsDisagreeError(
                f"after the hand-over of policy version {version} the log-probabilities of the sampler differ from the "
                f"trainer's by {gap.mean():.4f} nats a token on average (at most {gap.max():.4f}), more than "
                f"generation.max_logprob_gap = {self._limit}: they do not hold the same weights, or compute too "
                "differently"
            )
        return {"weights/logprob_gap_mean": float(gap.mean()), "weights/logprob_gap_max": float(gap.max())}
