"""REINFORCE leave-one-out (Kool et al. 2019; Ahmadian et al. 2024, arXiv 2402.14740)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from algorithms.base import Algorithm, DualClip, Ratio, Run, Section

if TYPE_CHECKING:
    from algorithms.rollout import Objective, Rollout


class RLOO(Algorithm):
    """Advantages over the mean of the other responses to a prompt, and a KL penalty in the reward."""

    name = "rloo"
    kl = "reward"
    policy_ratio = True
    least_group = 2

    class Settings(Section):
        """RLOO's policy ratio and its clipping."""

        ratio: Literal["sequence", "token"] = Field(
            "sequence", description="Clip one ratio a response (its product over tokens) or one a token"
        )
        dual_clip: DualClip = None

    def ratio(self, settings: Settings) -> Ratio:
        return settings.ratio

    def objective(self, rollout: Rollout, settings: Settings, run: Run) -> Objective:
        """A response's advantage is its return less the mean return of the other responses to its prompt.

        The return is score - beta * sum of kl_t. With ``ratio="sequence"`` one clipped ratio serves a response, the
        product over its tokens, and the loss is the mean over responses; with ``"token"`` the loss is the mean over
        tokens.
        """
        import torch

        from algorithms.advantages import leave_one_out
        from algorithms.normalise import by_sequence, by_token
        from algorithms.rollout import Objective, every_response, global_mean, kl_tokens, sequence_sums

        # In fp64: beside a large score an fp32 sum would round the penalty.
        penalties = run.kl_coef * sequence_sums(kl_tokens(rollout).double(), rollout.cu_seqlens)
        advantages = leave_one_out(rollout.scores.double() - penalties, rollout.group_ids)
        return Objective(
            units=every_response(rollout),
            advantages=torch.repeat_interleave(advantages, rollout.lengths),
            normalise=by_sequence if settings.ratio == "sequence" else by_token,
            loss={"loss": "clip", "ratio": settings.ratio, "dual_clip": settings.dual_clip},
            metrics={"rloo/zero_advantage_fraction": global_mean((advantages == 0).float(), run.reduce)},
        )
