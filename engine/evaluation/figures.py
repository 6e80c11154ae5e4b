"""Figures about responses, each with its standard error over prompts. NumPy alone.

A figure is computed of each prompt first, from all responses to it, and then averaged over prompts: responses to one
prompt are alike, and only prompts are drawn independently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Scores = Sequence[Sequence[float | None]]
"""A number for each response to each prompt; None for one that the judge has dropped."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A mean over prompts."""

    value: float
    stderr: float
    """Standard deviation over prompts over the root of their number; NaN for one prompt."""
    prompts: int


def over_prompts(values: Sequence[float]) -> Figure | None:
    """The mean of one value a prompt; None of no prompt."""
    count = len(values)
    if not count:
        return None
    spread = float(np.std(values, ddof=1)) / math.sqrt(count) if count > 1 else math.nan
    return Figure(float(np.mean(values)), spread, count)


def mean(scores: Scores) -> Figure | None:
    """The mean over a prompt's responses, over prompts that have one with a number."""
    kept = [[one for one in prompt if one is not None] for prompt in scores]
    return over_prompts([float(np.mean(prompt)) for prompt in kept if prompt])


def differences(scores: Scores, baseline: Scores) -> list[list[float]]:
    """score - baseline of every response with every response of the baseline to the same prompt."""
    return [
        [a - b for a in ours if a is not None for b in theirs if b is not None]
        for ours, theirs in zip(scores, baseline, strict=True)
    ]


def compared(pairs: Sequence[Sequence[float]]) -> dict[str, Figure | None]:
    """``win_rate``, the share of pairs with a number above 0, and ``ties``, that of those with 0.

    Args:
        pairs: for each prompt how much better each response is than one of the baseline.
    """
    kept = [np.array(prompt) for prompt in pairs if len(prompt)]
    return {
        "win_rate": over_prompts([float((prompt > 0).mean()) for prompt in kept]),
        "ties": over_prompts([float((prompt == 0).mean()) for prompt in kept]),
    }


def pass_at(scores: Scores, k: int) -> Figure | None:
    """The chance that one of k responses is right (Chen et al. 2021, arXiv 2107.03374, eq. 1).

    It is 1 - C(n - c, k) / C(n, k) for a prompt with c right responses of n, over prompts with at least k numbers.

    Args:
        scores: 1 for a right response, 0 for a wrong one.
    """
    chances = []
    for prompt in scores:
        kept = [one for one in prompt if one is not None]
        if len(kept) >= k:
            wrong = sum(one == 0 for one in kept)
            chances.append(1 - math.comb(wrong, k) / math.comb(len(kept), k))
    return over_prompts(chances)


def perplexity(logprobs: Sequence[float], tokens: Sequence[int]) -> Figure | None:
    """exp of the mean negative log-probability of a token; the standard error is the delta method's for a ratio.

    Args:
        logprobs: of all tokens of each prompt's responses together, in nats.
        tokens: how many these are.
    """
    count, total = len(logprobs), sum(tokens)
    if not total:
        return None
    surprise = -sum(logprobs) / total
    value = math.exp(min(surprise, 700.0))
    rest = np.array(logprobs) + surprise * np.array(tokens)
    spread = math.sqrt(count / (count - 1) * float(rest @ rest)) / total if count > 1 else math.nan
    return Figure(value, value * spread, count)
