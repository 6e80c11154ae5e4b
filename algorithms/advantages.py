"""Advantages: what a response, or a token of it, is worth beside others. Pure functions of scores and estimates."""

from __future__ import annotations

import torch
from torch import Tensor

from algorithms.rollout import Reduce, Rollout, kl_tokens

EPSILON = 1e-4
"""Added to a group's standard deviation, in units of score."""
ROUNDING = 2.0**-18
"""What fp32 sums over a few thousand tokens may be off by, relative to their magnitude: 64 times fp32's rounding."""


def group_normalised(scores: Tensor, group_ids: Tensor, scale: bool) -> Tensor:
    """[B] fp32, each score less its group's mean and, with ``scale``, over its standard deviation (of a sample, n - 1).

    Equal scores give exactly 0, at any magnitude.
    """
    _, group = torch.unique_consecutive(group_ids, return_inverse=True)
    size = torch.bincount(group)
    above = _above_first(scores, group)
    distance = above - (_group_sums(above, group, len(size)) / size)[group]
    if scale:
        deviation = (_group_sums(distance.square(), group, len(size)) / (size - 1).clamp(min=1)).sqrt()
        distance = distance / (deviation[group] + EPSILON)
    return distance.float()


def leave_one_out(returns: Tensor, group_ids: Tensor) -> Tensor:
    """[B] fp32, each return less the mean of the others in its group; every group has at least two members.

    Equal returns give exactly 0, at any magnitude.
    """
    _, group = torch.unique_consecutive(group_ids, return_inverse=True)
    size = torch.bincount(group)
    above = _above_first(returns, group)
    others = (_group_sums(above, group, len(size))[group] - above) / (size[group] - 1)
    return (above - others).float()


def _above_first(values: Tensor, group: Tensor) -> Tensor:
    """[B] fp64, each value less that of its group's first member.

    What groups are compared by starts from these: equal values are exactly 0 here, whatever their magnitude, while the
    mean of equal fp32 values is seldom the value itself.

    Args:
        values: [B], a group's members side by side.
        group: [B] int64, counting from 0, the place of each member's group.
    """
    wide = values.double()
    first = torch.searchsorted(group, torch.arange(int(group[-1]) + 1 if len(group) else 0, device=group.device))
    return wide - wide[first][group]


def _group_sums(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """[groups] sums of the values of each group's members."""
    return torch.zeros(groups, dtype=values.dtype, device=values.device).index_add_(0, group, values)


def token_rewards(rollout: Rollout, kl_coef: float) -> Tensor:
    """[T] -beta * kl_t, plus the score at the last token of each response, wherever and however it ended."""
    rewards = -kl_coef * kl_tokens(rollout)
    rewards[rollout.cu_seqlens[1:] - 1] += rollout.scores
    return rewards


def whiten(values: Tensor, reduce: Reduce, magnitudes: Tensor | None = None) -> Tensor:
    """Shifts and scales values to mean 0 and variance 1 over every rank's elements; zeros where they do not vary.

    They do not vary where their standard deviation is within ``ROUNDING`` of their magnitude: scaled to 1, that would
    be a direction made of rounding errors.

    Args:
        values: [T] fp32.
        reduce: sums over ranks.
        magnitudes: [T] fp32, of the numbers that each value is a difference of, which its rounding error goes by.
            Default: the value's own.
    """
    wide = values.double()
    squares = (wide if magnitudes is None else magnitudes.double()).square()
    sums = [torch.full_like(wide.sum(), wide.numel()), wide.sum(), squares.sum()]
    count, total, square = reduce(torch.stack(sums))
    count = count.clamp(min=1)
    centred = wide - total / count
    variance = reduce(centred.square().sum()) / count
    varies = variance > ROUNDING**2 * square / count
    return torch.where(varies, centred * torch.rsqrt(variance + 1e-8), 0.0).to(values.dtype)
