"""From a rank's samples to what its algorithm needs, and to the algorithm's objective."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from algorithms import grpo, ppo, rloo
from algorithms.base import Objective, Rollout, global_mean, kl_tokens, sequence_sums
from engine.config import Config
from engine.distributed import World
from engine.sample import Sample


def same_numerics(config: Config) -> bool:
    """True where sampler and trainer compute the same numbers up to fp32 rounding."""
    return config.generation.backend == "hf" and config.model.dtype == "float32"


def recomputes_old(config: Config) -> bool:
    """True where the update needs the trainer's own log-probabilities from before its first step.

    With one optimizer step and the same numerics the sampler's values are those; otherwise the trainer computes them.
    """
    several_steps = config.train.epochs_per_batch * config.train.minibatches_per_batch > 1
    return several_steps or not same_numerics(config)


def corrects(config: Config) -> bool:
    """True where tokens carry truncated importance weights min(exp(old - behaviour), cap)."""
    chosen = config.off_policy.correction
    return not same_numerics(config) if chosen is None else chosen


def behaviour_logprobs(samples: Sequence[Sample]) -> Tensor:
    """[T] fp32 log-probabilities the sampler gave, in nats, responses end to end."""
    return torch.cat([torch.from_numpy(sample.behaviour_logprobs) for sample in samples])


def rollout(
    samples: Sequence[Sample], old: Tensor, ref: Tensor | None, values: Tensor | None, end_values: Tensor | None
) -> Rollout:
    """A rank's samples as the flat vectors algorithms take."""
    lengths = torch.tensor([0] + [len(sample.response_ids) for sample in samples])
    return Rollout(
        scores=torch.tensor([sample.reward for sample in samples]),
        group_ids=torch.tensor([sample.group_id for sample in samples]),
        truncated=torch.tensor([sample.finish_reason == "length" for sample in samples]),
        cu_seqlens=lengths.cumsum(0),
        old_logprobs=old,
        ref_logprobs=ref,
        values=values,
        end_values=end_values,
    )


def objective(config: Config, rollout: Rollout, kl_coef: float, world: World) -> Objective:
    """The algorithm's objective on a rollout batch, with the off-policy correction where the run has one."""
    if config.algo == "ppo":
        result = ppo.objective(
            rollout,
            kl_coef=kl_coef,
            gamma=config.ppo.gamma,
            lam=config.ppo.lam,
            whiten_advantages=config.ppo.whiten_advantages,
            bootstrap_truncated=config.ppo.bootstrap_truncated,
            reduce=world.sum,
        )
    elif config.algo == "grpo":
        result = grpo.objective(
            rollout,
            kl_coef=kl_coef,
            kl_estimator=config.kl.estimator or "k3",
            scale=config.grpo.scale_advantages,
            mean=config.grpo.mean,
            reduce=world.sum,
        )
    else:
        result = rloo.objective(rollout, kl_coef=kl_coef, ratio=config.rloo.ratio, reduce=world.sum)
    if corrects(config):
        result.loss["is_cap"] = config.off_policy.cap
    return result


def metrics(samples: Sequence[Sample], rollout: Rollout, world: World, verified: bool) -> dict[str, float]:
    """What a rollout batch looks like, over all ranks: rewards, lengths, distance to the reference.

    ``verified``: scores are 0 or 1, and their mean an accuracy.
    """
    lengths = rollout.lengths.float()
    result = {
        "reward/mean": global_mean(rollout.scores, world.sum),
        "rollout/response_tokens_mean": global_mean(lengths, world.sum),
        "rollout/response_tokens_max": world.max(float(lengths.max())),
        "rollout/stopped_fraction": global_mean(1.0 - rollout.truncated.float(), world.sum),
    }
    if verified:
        correct = torch.tensor([sample.reward_parts["score"] for sample in samples])
        result["reward/accuracy"] = global_mean(correct, world.sum)
    mean = result["reward/mean"]
    result["reward/std"] = global_mean((rollout.scores - mean).square(), world.sum) ** 0.5
    if rollout.ref_logprobs is not None:
        kl = kl_tokens(rollout)
        result["kl/ref_mean"] = global_mean(sequence_sums(kl, rollout.cu_seqlens), world.sum)
        result["kl/ref_token_mean"] = global_mean(kl, world.sum)
    return result
