"""Group relative policy optimization (Shao et al. 2024, arXiv 2402.03300)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from algorithms.base import Algorithm, DualClip, Ratio, Run, Section

if TYPE_CHECKING:
    from algorithms.rollout import Objective, Rollout


class GRPO(Algorithm):
    """Advantages within the group of a prompt's responses, and a KL term in the loss."""

    name = "grpo"
    kl = "loss"
    kl_estimator = "k3"
    policy_ratio = True
    least_group = 2

    class Settings(Section):
        """GRPO's advantages, policy ratio and mean."""

        scale_advantages: bool = Field(
            True, description="Divide a group's advantages by the standard deviation of its scores"
        )
        mean: Literal["token", "sequence", "constant"] = Field(
            "token",
            description="Mean of the loss over all tokens; over responses of their token means (the paper's); or "
            "constant: over responses of their token sums divided by rollout.max_response_tokens (Dr. GRPO)",
        )
        loss: Literal["clip", "cispo"] = Field(
            "clip",
            description="clip: PPO's clipped ratio; cispo: the clipped ratio is a constant weight, and every token "
            "keeps a gradient (MiniMax 2025)",
        )
        ratio: Literal["token", "sequence_mean"] = Field(
            "token",
            description="One policy ratio a token, or one a response, the geometric mean over its tokens: with "
            "grpo.mean sequence that is GSPO",
        )
        dual_clip: DualClip = None

    def fault(self, settings: Settings) -> str | None:
        if settings.dual_clip is not None and settings.loss != "clip":
            return f"grpo.dual_clip bounds the loss of a clipped ratio, and grpo.loss is {settings.loss}: leave it out"
        return None

    def ratio(self, settings: Settings) -> Ratio:
        return settings.ratio

    def objective(self, rollout: Rollout, settings: Settings, run: Run) -> Objective:
        """A response's advantage is its score's distance from the mean of its group, in standard deviations.

        The KL penalty is a term of the loss, not of the score. Without ``scale_advantages`` the distance is not divided
        (Liu et al. 2025, arXiv 2503.20783: the division favours prompts that are nearly always or nearly never solved).

        The mean by ``sequence`` weighs every response alike, as the paper does; by ``token`` every token (Yu et al.
        2025, arXiv 2503.14476); and by ``constant`` every token alike whatever batch it is in (Liu et al. 2025: either
        of the others makes a long response's tokens count less, in its own mean or in its batch's).

        The loss ``cispo`` is MiniMax 2025's (arXiv 2506.13585), and the ratio ``sequence_mean`` Zheng et al. 2025's
        (GSPO, arXiv 2507.18071).
        """
        import torch

        from algorithms.advantages import group_normalised
        from algorithms.normalise import by_constant, by_sequence, by_token
        from algorithms.rollout import Objective, every_response, global_mean

        advantages = group_normalised(rollout.scores, rollout.group_ids, settings.scale_advantages)
        means = {"token": by_token, "sequence": by_sequence, "constant": by_constant(run.max_response_tokens)}
        return Objective(
            units=every_response(rollout),
            advantages=torch.repeat_interleave(advantages, rollout.lengths),
            normalise=means[settings.mean],
            loss={
                "loss": settings.loss,
                "ratio": settings.ratio,
                "dual_clip": settings.dual_clip,
                "kl_coef": run.kl_coef,
                "kl_estimator": run.kl_estimator,
            },
            metrics={"grpo/zero_advantage_fraction": global_mean((advantages == 0).float(), run.reduce)},
        )
