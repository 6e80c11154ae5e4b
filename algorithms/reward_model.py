"""A reward model of given pairs, by the likelihood of Bradley and Terry (1952), as in Stiennon et al. 2020.

Margins: Touvron et al. 2023, arXiv 2307.09288, section 3.2.2. Centring: Eisenstein et al. 2023, arXiv 2312.09244.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from algorithms.base import Algorithm, NonNegative, Run, Section

if TYPE_CHECKING:
    from torch import Tensor

    from algorithms.rollout import Objective, Rollout


class RewardModel(Algorithm):
    """The score of a data set's chosen responses above that of its rejected ones."""

    name = "reward_model"
    rows = "pair"
    batches = "rows"
    head = "score"

    class Settings(Section):
        """What a reward model's loss has beside the pairs."""

        centring_coef: NonNegative = Field(
            0.0,
            description="Weight of the mean of (chosen + rejected score)^2, which holds scores around 0; 0 leaves it "
            "out",
        )

    def objective(self, rollout: Rollout, settings: Settings, run: Run) -> Objective:
        """The mean loss of the pairs, whose chosen and rejected response lie side by side in this order."""
        import functools

        import torch

        from algorithms.normalise import by_pair
        from algorithms.rollout import Objective

        pairs = torch.arange(len(rollout.scores)).reshape(-1, 2)
        loss = functools.partial(pair_loss, centring_coef=settings.centring_coef)
        return Objective(units=pairs, normalise=by_pair, loss={}, score_loss=loss)


def pair_loss(chosen: Tensor, rejected: Tensor, margins: Tensor, centring_coef: float) -> Tensor:
    """-log sigmoid(chosen - rejected - margin) + centring_coef (chosen + rejected)^2 of each pair.

    Args:
        chosen, rejected: [P] fp32 scores.
        margins: [P] fp32, by how much the chosen response has to be above the other.

    Returns:
        [P] fp32.
    """
    from torch.nn.functional import logsigmoid

    return centring_coef * (chosen + rejected).square() - logsigmoid(chosen - rejected - margins)
