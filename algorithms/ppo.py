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
        whiten_advantages: to mean 0 and variance 1 over the response tokens of the rollout batch on all ranks.
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
    return Objective(
        units=every_response(rollout),
        advantages=whiten(advantages, reduce) if whiten_advantages else advantages,
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


def whiten(values: Tensor, reduce: Reduce) -> Tensor:
    """Shifts and scales [T] values to mean 0 and variance 1 over every rank's elements."""
    wide = values.double()
    count, total = reduce(torch.stack([torch.full_like(wide.sum(), wide.numel()), wide.sum()]))
    mean = total / count
    variance = reduce((wide - mean).square().sum()) / count
    return ((wide - mean) * torch.rsqrt(variance + 1e-8)).to(values.dtype)


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
    """1 - Var(returns - values) / Var(returns), over every rank's tokens; 0 where returns do not vary."""
    error, wide = (returns - values).double(), returns.double()
    count, *sums = reduce(
        torch.stack(
            [
                torch.full_like(wide.sum(), wide.numel()),
                error.sum(),
                error.square().sum(),
                wide.sum(),
                wide.square().sum(),
            ]
        )
    )
    error_mean, error_square, mean, square = (s / count for s in sums)
    variance = square - mean.square()
    return float(1 - (error_square - error_mean.square()) / variance) if variance > 1e-12 else 0.0
