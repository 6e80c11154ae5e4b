"""The value model's side of an actor-critic update: its loss, and how much of the returns it explains."""

from __future__ import annotations

import torch
from torch import Tensor

from algorithms.advantages import ROUNDING
from algorithms.rollout import Reduce


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """The clipped value loss of PPO, a token: half the larger squared error of the new and the clipped new value.

    Args:
        values, old_values, returns: [T] fp32.
        clip: new values count as at most this far from the old ones, in units of return.

    Returns:
        [T] loss, and [T] bool: where clipping decided.
    """
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    plain_error, clipped_error = (values - returns).square(), (clipped - returns).square()
    return 0.5 * torch.maximum(plain_error, clipped_error), (clipped_error > plain_error).detach()


def explained_variance(values: Tensor, returns: Tensor, reduce: Reduce) -> float:
    """1 - Var(returns - values) / Var(returns), over every rank's tokens; 0 where returns vary by rounding alone."""
    error, wide = (returns - values).double(), returns.double()
    count, *totals = reduce(torch.stack([torch.full_like(wide.sum(), wide.numel()), error.sum(), wide.sum()]))
    count = count.clamp(min=1)
    error_mean, mean = (total / count for total in totals)
    squares = reduce(torch.stack([(error - error_mean).square().sum(), (wide - mean).square().sum()]))
    error_variance, variance = (squares / count).tolist()
    return 1 - error_variance / variance if variance > (ROUNDING * float(mean)) ** 2 else 0.0
