"""Direct preference optimization on given pairs (Rafailov et al. 2023, arXiv 2305.18290)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from algorithms.base import Run
from algorithms.online_dpo import OnlineDPO

if TYPE_CHECKING:
    from algorithms.rollout import Objective, Rollout


class DPO(OnlineDPO):
    """The pairs of a data set's rows, compared with the reference policy; the settings are online DPO's."""

    name = "dpo"
    batches = "rows"

    def objective(self, rollout: Rollout, settings: OnlineDPO.Settings, run: Run) -> Objective:
        """Every row's chosen response against its rejected one, which lie side by side in this order."""
        import torch

        from algorithms.normalise import by_pair
        from algorithms.rollout import Objective

        pairs = torch.arange(len(rollout.scores)).reshape(-1, 2)
        return Objective(units=pairs, normalise=by_pair, loss=settings.model_dump())
