"""The coefficient of the KL penalty: fixed, or steered towards a target (Ziegler et al. 2019, arXiv 1909.08593)."""

from __future__ import annotations

import math


def adapted(coef: float, kl: float, target: float, horizon: int, episodes: int) -> float:
    """The next coefficient of the proportional controller.

    Args:
        coef: current coefficient, per nat.
        kl: measured KL of a response, in nats; one that is not finite changes nothing.
        target: KL to aim at, in nats.
        horizon: episodes over which the coefficient moves by its whole clipped error; at most that much in one change.
        episodes: episodes since the last change.
    """
    if not math.isfinite(kl):
        return coef
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * min(1.0, episodes / horizon))
