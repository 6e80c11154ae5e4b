"""What every score source is asked with, and what it must answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from engine.sample import Sample

Scores = list[float | None]
"""One finite number a response; None where the source has none, which drops the response."""
Source = Callable[[Sequence[Sample]], Scores]
"""A score source; it may be given no sample at all."""


class RewardError(RuntimeError):
    """A score source failed, or gave something that is not one finite number a response."""


def columns(samples: Sequence[Sample], prompt_column: str, taken: Collection[str]) -> dict[str, list[Any]]:
    """The data set's columns beside the prompt, a list over the samples each; None where a row lacks one.

    Args:
        taken: names that mean something else.

    Raises:
        RewardError: a column has one of these names.
    """
    names = {name for sample in samples for name in sample.columns} - {prompt_column}
    if clash := sorted(names & set(taken)):
        raise RewardError(f"the data set's column '{clash[0]}' has the name of something else that rewards are given")
    return {name: [sample.columns.get(name) for sample in samples] for name in sorted(names)}


def checked(returned: Any, samples: Sequence[Sample], source: str) -> Scores:
    """A source's answer as one finite float or None a sample.

    Args:
        source: what answered, for messages.

    Raises:
        RewardError: wrong number of scores, or one that is not finite; names the prompt.
    """
    try:
        scores = [None if one is None else float(one) for one in returned]
    except (TypeError, ValueError, OverflowError) as error:
        raise RewardError(
            f"{source} must return one number a response, or None to drop it, {len(samples)} here; it returned "
            f"{returned!r:.200} ({error})"
        ) from error
    if len(scores) != len(samples):
        raise RewardError(f"{source} returned {len(scores)} scores for {len(samples)} responses")
    for sample, score in zip(samples, scores, strict=True):
        if score is not None and not math.isfinite(score):
            raise RewardError(
                f"{source} returned {score} for the prompt {sample.prompt_text!r} "
                f"and the response {sample.response_text!r}"
            )
    return scores
