"""From a rank's samples to what its algorithm needs, and to the algorithm's objective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from algorithms import bok, grpo, online_dpo, ppo, rloo
from algorithms.base import Objective, Rollout, every_response, global_mean, kl_tokens, sequence_sums
from engine.config import Config
from engine.machine.world import World
from engine.sample import Sample
from kernels.coefficients import LOG_RATIO_LIMIT


def same_numerics(config: Config) -> bool:
    """True where sampler and trainer compute the same numbers up to fp32 rounding."""
    return config.generation.backend == "hf" and config.model.dtype == "float32"


def samplers_values_serve(config: Config) -> bool:
    """True where *old* is what the sampler gave.

    With one optimizer step, the same numerics and fresh samples these are the trainer's. Losses without a ratio use
    *old* in metrics only.
    """
    fresh = same_numerics(config) and config.schedule.staleness == 0
    return not config.has_policy_ratio or (fresh and _single_step(config))


def recomputes_old(config: Config) -> bool:
    """True where the trainer computes *old* in a pass of its own, before the update.

    Otherwise, where the sampler's values do not serve, the passes of an update's only optimizer step give them, as
    long as no reward is made of them.
    """
    in_rewards = config.algo in ("ppo", "rloo") and config.has_reference
    return not samplers_values_serve(config) and (in_rewards or not _single_step(config))


def _single_step(config: Config) -> bool:
    return config.train.epochs_per_batch * config.train.minibatches_per_batch == 1


def corrects(config: Config) -> bool:
    """True where tokens carry truncated importance weights min(exp(old - behaviour), cap)."""
    if not config.has_policy_ratio:
        return False
    chosen = config.off_policy.correction
    return not same_numerics(config) or config.schedule.staleness > 0 if chosen is None else chosen


def usable(samples: Sequence[Sample], config: Config) -> list[Sample]:
    """The samples that a reward was found for, of groups with as many of them as the algorithm compares."""
    scored = [sample for sample in samples if sample.reward is not None]
    members = Counter(sample.group_id for sample in scored)
    return [sample for sample in scored if members[sample.group_id] >= config.least_group]


def behaviour_logprobs(samples: Sequence[Sample]) -> Tensor:
    """[T] fp32 log-probabilities the sampler gave, in nats, responses end to end."""
    logprobs = [torch.from_numpy(sample.behaviour_logprobs) for sample in samples]
    return torch.cat(logprobs) if logprobs else torch.empty(0)


def rollout(
    samples: Sequence[Sample], old: Tensor | None, ref: Tensor | None, values: Tensor | None, end_values: Tensor | None
) -> Rollout:
    """A rank's samples as the flat vectors algorithms take."""
    lengths = torch.tensor([0] + [len(sample.response_ids) for sample in samples])
    return Rollout(
        scores=torch.tensor([sample.reward for sample in samples], dtype=torch.float32),
        group_ids=torch.tensor([sample.group_id for sample in samples], dtype=torch.int64),
        truncated=torch.tensor([sample.finish_reason == "length" for sample in samples], dtype=torch.bool),
        cu_seqlens=lengths.cumsum(0),
        old_logprobs=old,
        ref_logprobs=ref,
        values=values,
        end_values=end_values,
    )


def objective(config: Config, rollout: Rollout, kl_coef: float, world: World) -> Objective:
    """The algorithm's objective on a rollout batch, with the off-policy correction where the run has one.

    Where no rank has a response there is nothing to train on and nothing to measure.
    """
    if not world.max(len(rollout.scores)):
        return Objective(units=every_response(rollout), normalise="token", loss={})
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
    elif config.algo == "rloo":
        result = rloo.objective(rollout, kl_coef=kl_coef, ratio=config.rloo.ratio, reduce=world.sum)
    elif config.algo == "online_dpo":
        result = online_dpo.objective(rollout, **config.dpo.model_dump(), reduce=world.sum)
    else:
        result = bok.objective(rollout, reduce=world.sum)
    if corrects(config):
        result.loss["is_cap"] = config.off_policy.cap
    return result


def off_policy_metrics(
    config: Config, samples: Sequence[Sample], old: Tensor, behaviour: Tensor, version: int, world: World
) -> dict[str, float]:
    """How old the samples are, and the importance weights that the loss gives them.

    The weights are those before ``off_policy.cap``: one a token or, with RLOO's sequence ratio, one a response. A loss
    that is not corrected has none of them, and neither has a batch of which no rank has a response.

    Args:
        old, behaviour: [T] fp32, nats.
        version: updates the policy has seen.
    """
    if not world.max(len(samples)):
        return {}
    age = torch.tensor([float(version - sample.policy_version) for sample in samples])
    staleness = {"off_policy/staleness": global_mean(age, world.sum)}
    if not corrects(config):
        return staleness
    log_ratio = old - behaviour
    if config.algo == "rloo" and config.rloo.ratio == "sequence":
        lengths = torch.tensor([0] + [len(sample.response_ids) for sample in samples])
        log_ratio = sequence_sums(log_ratio, lengths.cumsum(0))
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return staleness | {
        "off_policy/ratio_mean": global_mean(ratio, world.sum),
        "off_policy/ratio_max": world.max(max(ratio.tolist(), default=0.0)),
        "off_policy/capped_fraction": global_mean((ratio > config.off_policy.cap).float(), world.sum),
    }


def metrics(samples: Sequence[Sample], rollout: Rollout, world: World, verified: bool) -> dict[str, float]:
    """What a rollout batch looks like, over all ranks: rewards, lengths, distance to the reference.

    ``verified``: scores are 0 or 1, and their mean an accuracy. Nothing where no rank has a response.
    """
    if not world.max(len(samples)):
        return {}
    lengths = rollout.lengths.float()
    result = {
        "reward/mean": global_mean(rollout.scores, world.sum),
        "rollout/response_tokens_mean": global_mean(lengths, world.sum),
        "rollout/response_tokens_max": world.max(max(lengths.tolist(), default=0.0)),
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


def held_out_metrics(samples: Sequence[Sample], config: Config, world: World) -> dict[str, float]:
    """The mean score of this and all ranks' responses to the held-out prompts, a prompt's side by side.

    With several responses a prompt also ``eval/pass@k``: the share of prompts with a right one among the k, or the mean
    of their best scores. Nothing where every response of every rank was dropped.
    """
    scores = torch.tensor([one.reward_parts["score"] for one in samples if one.reward is not None])
    if not world.max(len(scores)):
        return {}
    found = {config.eval_metric: global_mean(scores, world.sum)}
    if (k := config.eval.samples_per_prompt) > 1:
        prompts = [samples[i : i + k] for i in range(0, len(samples), k)]
        scored = [[one.reward_parts["score"] for one in prompt if one.reward is not None] for prompt in prompts]
        best = [max(prompt) for prompt in scored if prompt]
        found[f"eval/{'pass' if config.has_verifier else 'best'}@{k}"] = global_mean(torch.tensor(best), world.sum)
    return found
