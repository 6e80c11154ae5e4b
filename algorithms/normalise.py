"""Means of a loss over a minibatch: ``Objective.normalise``.

A minibatch is split into microbatches and ranks. Each mean is therefore a function of one microbatch that gives the
weights of its tokens (or pairs) and what it adds to the number that the minibatch's weighted sum is divided by.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Weights(NamedTuple):
    """Of one microbatch; the loss is the minibatch's sum of ``terms`` times losses over its sum of ``divisor``."""

    terms: Tensor
    """[R] fp32, a weight for each response token; or [P] for each pair."""
    divisor: Tensor
    """Scalar, fp64."""


Normalise = Callable[[Tensor], Weights]
"""Takes the [S] int64 lengths of a microbatch's responses, in tokens; those of a pair are neighbours."""


def by_token(lengths: Tensor) -> Weights:
    """The mean over response tokens."""
    return _mean(lengths.new_ones(int(lengths.sum()), dtype=torch.float32))


def by_sequence(lengths: Tensor) -> Weights:
    """The mean over responses of the means over their tokens."""
    return _mean(torch.repeat_interleave(1.0 / lengths, lengths))


def by_pair(lengths: Tensor) -> Weights:
    """The mean over pairs."""
    return _mean(lengths.new_ones(len(lengths) // 2, dtype=torch.float32))


def by_constant(constant: int) -> Normalise:
    """The mean over responses of the sums over their tokens divided by a constant (Liu et al. 2025, arXiv 2503.20783).

    Args:
        constant: such as the longest response, in tokens.
    """

    def weights(lengths: Tensor) -> Weights:
        terms = torch.full((int(lengths.sum()),), 1.0 / constant, device=lengths.device)
        return Weights(terms, torch.tensor(len(lengths), dtype=torch.float64, device=lengths.device))

    return weights


def _mean(terms: Tensor) -> Weights:
    return Weights(terms, terms.double().sum())
