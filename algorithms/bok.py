"""Best-of-K fine-tuning: maximum likelihood of the best of K samples (Gao et al. 2023, arXiv 2210.10760; as a learning
algorithm: Noukhovitch et al. 2024, arXiv 2410.18252)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from algorithms.base import Algorithm, Run

if TYPE_CHECKING:
    from algorithms.rollout import Objective, Rollout


class BestOfK(Algorithm):
    """Maximum likelihood of each prompt's best response."""

    name = "bok"

    def objective(self, rollout: Rollout, settings: None, run: Run) -> Objective:
        """The mean negative log-likelihood of the tokens of each group's best response; the first of equally good
        ones."""
        from algorithms.rollout import best_and_worst, global_mean, likelihood

        extremes = best_and_worst(rollout)
        best, worst = rollout.scores[extremes].unbind(1)
        metrics = {
            "bok/best_score": global_mean(best, run.reduce),
            "bok/tied_fraction": global_mean((best == worst).float(), run.reduce),
        }
        return likelihood(extremes[:, :1], metrics)
