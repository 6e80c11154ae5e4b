"""Best-of-K fine-tuning: maximum likelihood of the best of K samples (Gao et al. 2023, arXiv 2210.10760; as a learning
algorithm: Noukhovitch et al. 2024, arXiv 2410.18252)."""

from __future__ import annotations

from algorithms.base import Objective, Reduce, Rollout, best_and_worst, global_mean


def objective(rollout: Rollout, *, reduce: Reduce) -> Objective:
    """The mean negative log-likelihood of the tokens of each group's best response; the first of equally good ones."""
    extremes = best_and_worst(rollout)
    best, worst = rollout.scores[extremes].unbind(1)
    return Objective(
        units=extremes[:, :1],
        normalise="token",
        loss={"loss": "likelihood"},
        metrics={
            "bok/best_score": global_mean(best, reduce),
            "bok/tied_fraction": global_mean((best == worst).float(), reduce),
        },
    )
