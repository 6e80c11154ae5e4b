"""REINFORCE leave-one-out (Kool et al. 2019; Ahmadian et al. 2024, arXiv 2402.14740)."""

from __future__ import annotations

import torch
from torch import Tensor

from algorithms.base import (
    Objective,
    Reduce,
    Rollout,
    above_first,
    every_response,
    global_mean,
    group_sums,
    kl_tokens,
    sequence_sums,
)


def objective(rollout: Rollout, *, kl_coef: float, ratio: str, reduce: Reduce) -> Objective:
    """A response's advantage is its return less the mean return of the other responses to its prompt.

    The return is score - beta * sum of kl_t. With ``ratio="sequence"`` one clipped ratio serves a response, the product
    over its tokens, and the loss is the mean over responses; with ``"token"`` the loss is the mean over tokens.
    """
    # In fp64: beside a large score an fp32 sum would round the penalty.
    returns = rollout.scores.double() - kl_coef * sequence_sums(kl_tokens(rollout).double(), rollout.cu_seqlens)
    advantages = leave_one_out(returns, rollout.group_ids)
    return Objective(
        units=every_response(rollout),
        advantages=torch.repeat_interleave(advantages, rollout.lengths),
        normalise="sequence" if ratio == "sequence" else "token",
        loss={"loss": "clip", "ratio": ratio},
        metrics={"rloo/zero_advantage_fraction": global_mean((advantages == 0).float(), reduce)},
    )


def leave_one_out(returns: Tensor, group_ids: Tensor) -> Tensor:
    """[B] fp32, each return less the mean of the others in its group; every group has at least two members.

    Equal returns give exactly 0, at any magnitude.
    """
    _, group = torch.unique_consecutive(group_ids, return_inverse=True)
    size = torch.bincount(group)
    above = above_first(returns, group)
    others = (group_sums(above, group, len(size))[group] - above) / (size[group] - 1)
    return (above - others).float()
