"""Proximal policy optimization (Schulman et al. 2017, arXiv 1707.06347).

As in Stiennon et al. 2020 (arXiv 2009.01325), the reward of token t is -beta * kl_t, plus the response's score on its
last token; advantages and returns come from
generalized advantage estimation (Schulman et al. 2016, arXiv 1506.02438).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from algorithms.base import Algorithm, DualClip, Run, Unit, ValueModelSettings

if TYPE_CHECKING:
    from algorithms.rollout import Objective, Rollout


class PPO(Algorithm):
    """Advantages by a value model, and a KL penalty in the reward of each token."""

    name = "ppo"
    value_model = True
    kl = "reward"
    policy_ratio = True

    class Settings(ValueModelSettings):
        """PPO's advantages, clipping and value model."""

        gamma: Unit = Field(1.0, description="Discount per token")
        lam: Unit = Field(0.95, description="GAE's lambda")
        whiten_advantages: bool = Field(
            True,
            description="Shift and scale advantages to mean 0, variance 1 over the rollout batch's response tokens",
        )
        bootstrap_truncated: bool = Field(
            False, description="Responses cut off by their length end with the value model's estimate instead of 0"
        )
        dual_clip: DualClip = None

    def objective(self, rollout: Rollout, settings: Settings, run: Run) -> Objective:
        """Advantages, returns and the clipped loss of PPO; the value model's loss is ``algorithms.value.value_loss``.

        Advantages are whitened over the response tokens of the rollout batch on all ranks, to zeros where they vary by
        rounding alone.
        """
        import torch

        import kernels
        from algorithms.advantages import token_rewards, whiten
        from algorithms.normalise import by_token
        from algorithms.rollout import Objective, every_response
        from algorithms.value import explained_variance

        assert rollout.values is not None, "PPO needs the value model's estimates"
        bootstrap = None
        if settings.bootstrap_truncated:
            assert rollout.end_values is not None
            bootstrap = rollout.end_values.where(rollout.truncated, 0.0)
        advantages, returns = kernels.gae(
            token_rewards(rollout, run.kl_coef),
            rollout.values,
            rollout.cu_seqlens,
            gamma=settings.gamma,
            lam=settings.lam,
            bootstrap=bootstrap,
        )
        if settings.whiten_advantages:
            magnitudes = torch.maximum(rollout.values.abs(), returns.abs())
            advantages = whiten(advantages, run.reduce, magnitudes)
        return Objective(
            units=every_response(rollout),
            advantages=advantages,
            returns=returns,
            normalise=by_token,
            loss={"loss": "clip", "ratio": "token", "dual_clip": settings.dual_clip},
            metrics={"value/explained_variance": explained_variance(rollout.values, returns, run.reduce)},
        )
