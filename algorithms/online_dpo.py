"""Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290), online (Guo et al. 2024, arXiv 2402.04792).

Pairs are made from fresh responses, by their scores. No correction for samples of an older policy: the loss compares
two given responses, whoever wrote them (Noukhovitch et al. 2024, arXiv 2410.18252).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from algorithms.base import Algorithm, Run, Section

if TYPE_CHECKING:
    from algorithms.rollout import Objective, Rollout


class OnlineDPO(Algorithm):
    """Pairs of each prompt's best and worst response, compared with the reference policy."""

    name = "online_dpo"
    section = "dpo"
    reference = True
    least_group = 2
    rows = "pair"

    class Settings(Section):
        """Online DPO's preference loss."""

        beta: Annotated[float, Field(gt=0)] = Field(
            0.1, description="Strength of the hold on the reference policy, per nat of log-ratio"
        )
        loss: Literal["sigmoid", "ipo", "hinge"] = Field("sigmoid", description="Loss of a pair's margin")
        label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
            0.0, description="Share of pairs taken to be labelled wrongly (with dpo.loss sigmoid)"
        )

    def fault(self, settings: Settings) -> str | None:
        if settings.label_smoothing and settings.loss != "sigmoid":
            return f"dpo.label_smoothing goes with dpo.loss sigmoid, not {settings.loss}: leave it out"
        return None

    def objective(self, rollout: Rollout, settings: Settings, run: Run) -> Objective:
        """Of each group the best response against the worst; a group whose scores are all the same makes no pair.

        The settings are those of ``kernels.linear_preference_loss``.
        """
        from algorithms.normalise import by_pair
        from algorithms.rollout import Objective, best_and_worst, global_mean

        extremes = best_and_worst(rollout)
        best, worst = rollout.scores[extremes].unbind(1)
        return Objective(
            units=extremes[best > worst],
            normalise=by_pair,
            loss=settings.model_dump(),
            metrics={"online_dpo/tied_fraction": global_mean((best == worst).float(), run.reduce)},
        )
