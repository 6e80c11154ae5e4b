"""What an objective is made from and what it is: a rollout batch, and the sums and choices that algorithms share.

Token quantities are flat vectors: responses end to end, ``cu_seqlens`` their borders.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from algorithms.normalise import Normalise, by_token
from kernels.token_losses import KL_ROUNDING

Reduce = Callable[[Tensor], Tensor]
"""Elementwise sum over the ranks that share a rollout batch; the identity on one rank."""
ScoreLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A differentiable loss of P pairs, [P] fp32, by the scores of chosen and of rejected responses, [P] fp32 each, and the
margins between them that the rows ask for, [P] fp32."""


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
    normalise: Normalise
    """The mean over a minibatch of all ranks; ``by_pair`` for pairs."""
    loss: dict[str, Any]
    """Keyword arguments of ``kernels.linear_policy_loss``, or for pairs of ``kernels.linear_preference_loss``, that do
    not vary by token."""
    advantages: Tensor | None = None
    """[T] fp32; None for a likelihood and for pairs."""
    returns: Tensor | None = None
    """[T] fp32, targets of the value model."""
    score_loss: ScoreLoss | None = None
    """Of pairs, for a reward model: in the place of a kernel with the arguments ``loss``."""
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def compares_pairs(self) -> bool:
        """True where units are pairs, for ``kernels.linear_preference_loss`` or ``score_loss``."""
        return self.units.shape[1] == 2


def likelihood(units: Tensor, metrics: dict[str, float]) -> Objective:
    """The mean negative log-likelihood of the tokens of some responses, [U, 1]."""
    return Objective(units=units, normalise=by_token, loss={"loss": "likelihood"}, metrics=metrics)


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


def global_mean(values: Tensor, reduce: Reduce, sizes: Tensor | None = None) -> float:
    """Mean of the elements of every rank's ``values``.

    Args:
        sizes: how many elements each value is the sum of, such as a row's tokens. Default: one each.
    """
    wide, sizes = _in_fp64(values, sizes)
    total, count = reduce(torch.stack([wide.sum(), sizes.sum()])).tolist()
    return total / count if count else 0.0


def global_stderr(values: Tensor, reduce: Reduce, sizes: Tensor | None = None) -> float | None:
    """Standard error of ``global_mean`` where the values, and no parts of them, are drawn independently; None for fewer
    than two.

    That is the values' standard deviation over the root of their number; with ``sizes``, where the mean is a ratio of
    two sums, by the delta method (Cochran 1977, Sampling Techniques, section 2.11).
    """
    wide, sizes = _in_fp64(values, sizes)
    number = torch.full_like(wide.sum(), len(wide))
    rows, total, count = reduce(torch.stack([number, wide.sum(), sizes.sum()])).tolist()
    ratio = total / count if count else 0.0
    squares = float(reduce((wide - ratio * sizes).square().sum()))
    return (squares * rows / (rows - 1)) ** 0.5 / count if rows > 1 else None


def _in_fp64(values: Tensor, sizes: Tensor | None) -> tuple[Tensor, Tensor]:
    wide = values.double()
    return wide, torch.ones_like(wide) if sizes is None else sizes.double()
