"""Proximal policy optimization (Schulman et al. 2017, arXiv 1707.06347).

As in Stiennon et al. 2020 (arXiv 2009.01325), the reward of token t is -beta * kl_t, plus the response's score on its
last token; advantages and returns come from
generalized advantage estimation (Schulman et al. 2016, arXiv 1506.02438).
"""

from __future__ import annotations

import torch
from torch import Tensor

import kernels
from algorithms.base import Objective, Reduce, Rollout, every_response, kl_tokens

ROUNDING = 2.0**-18
"""What fp32 sums over a few thousand tokens may be off by, relative to their magnitude: 64 times fp32's rounding."""


def objective(
    rollout: Rollout,
    *,
    kl_coef: float,
    gamma: float,
    lam: float,
    whiten_advantages: bool,
    bootstrap_truncated: bool,
    reduce: Reduce,
) -> Objective:
    """Advantages, returns and the clipped loss of PPO.

    Args:
        rollout: needs ``values``, and ``end_values`` with ``bootstrap_truncated``.
        kl_coef: beta, per nat.
        gamma, lam: discount and GAE's lambda, per token.
        whiten_advantages: to mean 0 and variance 1 over the response tokens of the rollout batch on all ranks; to
            zeros where they vary by rounding alone.
        bootstrap_truncated: end responses that were cut off with the value model's estimate instead of 0.
        reduce: sums over ranks.
    """
    assert rollout.values is not None, "PPO needs the value model's estimates"
    rewards = token_rewards(rollout, kl_coef)
    bootstrap = None
    if bootstrap_truncated:
        assert rollout.end_values is not None
        bootstrap = torch.where(rollout.truncated, rollout.end_values, torch.zeros_like(rollout.end_values))
    advantages, returns = kernels.gae(
        rewards, rollout.values, rollout.cu_seqlens, gamma=gamma, lam=lam, bootstrap=bootstrap
    )
    magnitudes = torch.maximum(rollout.values.abs(), returns.abs())
    return Objective(
        units=every_response(rollout),
        advantages=whiten(advantages, reduce, magnitudes) if whiten_advantages else advantages,
        returns=returns,
        normalise="token",
        loss={"loss": "clip", "ratio": "token"},
        metrics={"value/explained_variance": explained_variance(rollout.values, returns, reduce)},
    )


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
