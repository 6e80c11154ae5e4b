"""How sampler and trainer prove that they hold the same weights, whatever the samples are drawn from.

After every hand-over the digests of what lies in the sampler are compared with those of what was sent, tensor by
tensor: that sees one tensor which was not updated, at any learning rate. That both compute the same with the weights is
another proof. Where samples are as old as the trainer's weights, their own log-probabilities are that proof. A sampler
that runs ahead never gives such samples; it is asked for the log-probabilities of a few fixed responses after every
hand-over instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.generation.base import Text
from engine.sample import Sample
from engine.training.trainer import Trainer, WeightsDisagreeError

NAMED = 4
"""Most tensors that a message names."""


class HandOverError(RuntimeError):
    """The sampler does not hold the weights that it was handed, or gives other tokens by the same ones."""


def lost(version: int, names: Sequence[str]) -> HandOverError:
    """The error of a hand-over that left these tensors of the sampler with other numbers than were sent."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return HandOverError(
        f"after the hand-over of policy version {version} the sampler does not hold what it was sent in {len(names)} "
        f"tensor(s): {', '.join(names[:NAMED])}{more}: its loader lost or changed them. Resume from the last "
        "checkpoint; if it happens again, with generation.backend hf"
    )


def unread(names: Sequence[str]) -> str:
    """What a person is told at start of tensors that no digest is compared of."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return (
        f"{len(names)} tensor(s) cannot be read back from the sampler in the form that they are sent in, so that "
        "log-probabilities alone check their hand-over (weights/unread_tensors): "
        f"{', '.join(names[:NAMED])}{more}"
    )


class Proof:
    """Texts to compute log-probabilities of: some prompts and the sampler's first greedy responses to them."""

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
