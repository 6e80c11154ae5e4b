"""Supervised fine-tuning: maximum likelihood of given responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from algorithms.base import Algorithm, Run

if TYPE_CHECKING:
    from algorithms.rollout import Objective, Rollout


class SFT(Algorithm):
    """Maximum likelihood of the responses in a data set's rows."""

    name = "sft"
    batches = "rows"

    def objective(self, rollout: Rollout, settings: None, run: Run) -> Objective:
        """The mean negative log-likelihood of the tokens that the loss is of, over those of the whole batch."""
        from algorithms.rollout import every_response, likelihood

        return likelihood(every_response(rollout), {})
