"""What every algorithm takes and gives.

Token quantities are flat vectors: responses end to end, ``cu_seqlens`` their borders.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from kernels.coefficients import KL_ROUNDING

Reduce = Callable[[Tensor], Tensor]
"""Elementwise sum over the ranks that share a rollout batch; the identity on one rank."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """A rollout batch on one rank: B responses with T tokens in all."""

    scores: Tensor
    """[B] fp32, reward of a response."""
    group_ids: Tensor
    """[B] int64, equal for responses to the same prompt; a group lies on one rank, its members side by side."""
    truncated: Tensor
    """[B] bool, cut off by its length."""
    cu_seqlens: Tensor
    """[B + 1] int64, where each response begins in the flat vectors."""
    old_logprobs: Tensor | None
    """[T] fp32, nats, of the policy at the start of the update; None where the update's own passes will tell."""
    ref_logprobs: Tensor | None = None
    """[T] fp32, nats, of the frozen reference; None without a KL penalty."""
    values: Tensor | None = None
    """[T] fp32, value model's estimate before each response token; only for algorithms that have one."""
    end_values: Tensor | None = None
    """[B] fp32, the estimate after the last response token."""

    @property
    def lengths(self) -> Tensor:
        """[B] int64, response tokens."""
        return self.cu_seqlens.diff()


@dataclass(frozen=True, slots=True)
class Objective:
    """What the update minimises on a rollout batch."""

    units: Tensor
    """[U, n] int64, which of the rank's B responses are trained on, each row together: single ones, or chosen and
    rejected. A minibatch is made of whole units."""
    normalise: Literal["token", "sequence", "pair"]
    """Mean over the minibatch's response tokens, or mean over its responses of their token means, or mean over its
    pairs; over all ranks."""
    loss: dict[str, Any]
    """Keyword arguments of ``kernels.linear_policy_loss``, or for pairs of ``kernels.linear_preference_loss``, that do
    not vary by token."""
    advantages: Tensor | None = None
    """[T] fp32; None for a likelihood and for pairs."""
    returns: Tensor | None = None
    """[T] fp32, targets of the value model."""
    metrics: dict[str, float] = field(default_factory=dict)


def every_response(rollout: Rollout) -> Tensor:
    """[B, 1] units that train on each response by itself."""
    return torch.arange(len(rollout.scores))[:, None]


def best_and_worst(rollout: Rollout) -> Tensor:
    """[groups, 2] the responses with the highest and with the lowest score of each group; of equals the first."""
    _, sizes = torch.unique_consecutive(rollout.group_ids, return_counts=True)
    groups = torch.arange(len(rollout.scores)).split(sizes.tolist())
    extremes = [[group[rollout.scores[group].argmax()], group[rollout.scores[group].argmin()]] for group in groups]
    return torch.tensor(extremes, dtype=torch.int64).reshape(-1, 2)


def sequence_sums(tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sums a flat [T] vector by response: [B]."""
    lengths = cu_seqlens.diff()
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=tokens.device), lengths)
    return torch.zeros(len(lengths), dtype=tokens.dtype, device=tokens.device).index_add_(0, owner, tokens)


def above_first(values: Tensor, group: Tensor) -> Tensor:
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


def group_sums(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """[groups] sums of the values of each group's members."""
    return torch.zeros(groups, dtype=values.dtype, device=values.device).index_add_(0, group, values)


def kl_tokens(rollout: Rollout) -> Tensor:
    """[T] k1 estimate of KL(policy || reference): old minus reference log-probability; 0 without a reference.

    And 0 where they differ by rounding, which in a batch of equal scores would be all there is to learn from.
    """
    if rollout.ref_logprobs is None:
        return rollout.scores.new_zeros(int(rollout.cu_seqlens[-1]))
    old = rollout.old_logprobs
    assert old is not None
    difference = old - rollout.ref_logprobs
    return difference.where(difference.abs() > KL_ROUNDING * old.abs().clamp(min=1), 0.0)


def global_mean(values: Tensor, reduce: Reduce) -> float:
    """Mean of the elements of every rank's ``values``."""
    total = reduce(
        torch.stack([values.double().sum(), torch.tensor(values.numel(), dtype=torch.float64, device=values.device)])
    )
    return float(total[0] / total[1].clamp(min=1))
