"""Group relative policy optimization (Shao et al. 2024, arXiv 2402.03300)."""

from __future__ import annotations

import torch
from torch import Tensor

from algorithms.base import Objective, Reduce, Rollout, above_first, every_response, global_mean, group_sums

EPSILON = 1e-4
"""Added to a group's standard deviation, in units of score."""


def objective(
    rollout: Rollout, *, kl_coef: float, kl_estimator: str, scale: bool, mean: str, reduce: Reduce
) -> Objective:
    """A response's advantage is its score's distance from the mean of its group, in standard deviations.

    The KL penalty is a term of the loss, not of the score; ``kl_estimator`` is one of ``kernels.linear_policy_loss``.
    Without ``scale`` the distance is not divided (Liu et al. 2025, arXiv 2503.20783: the division favours prompts that
    are nearly always or nearly never solved). ``mean="sequence"`` weighs every response alike, as the paper does;
    ``"token"`` every token (Yu et al. 2025, arXiv 2503.14476).
    """
    advantages = group_normalised(rollout.scores, rollout.group_ids, scale)
    return Objective(
        units=every_response(rollout),
        advantages=torch.repeat_interleave(advantages, rollout.lengths),
        normalise="sequence" if mean == "sequence" else "token",
        loss={"loss": "clip", "ratio": "token", "kl_coef": kl_coef, "kl_estimator": kl_estimator},
        metrics={"grpo/zero_advantage_fraction": global_mean((advantages == 0).float(), reduce)},
    )


def group_normalised(scores: Tensor, group_ids: Tensor, scale: bool) -> Tensor:
    """[B] fp32, each score less its group's mean and, with ``scale``, over its standard deviation (of a sample, n - 1).

    Equal scores give exactly 0, at any magnitude.
    """
    _, group = torch.unique_consecutive(group_ids, return_inverse=True)
    size = torch.bincount(group)
    above = above_first(scores, group)
    distance = above - (group_sums(above, group, len(size)) / size)[group]
    if scale:
        deviation = (group_sums(distance.square(), group, len(size)) / (size - 1).clamp(min=1)).sqrt()
        distance = distance / (deviation[group] + EPSILON)
    return distance.float()
