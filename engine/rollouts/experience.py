"""From a rank's samples to what its algorithm needs, and to the algorithm's objective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from algorithms.base import Run
from algorithms.normalise import by_token
from algorithms.rollout import (
    Objective,
    Rollout,
    every_response,
    global_mean,
    global_stderr,
    kl_tokens,
    sequence_sums,
)
from engine.config import Config
from engine.machine.world import World
from engine.rollouts import off_policy
from engine.sample import Sample


def usable(samples: Sequence[Sample], config: Config) -> list[Sample]:
    """The samples that a reward was found for, of groups with as many of them as the algorithm compares."""
    scored = [sample for sample in samples if sample.reward is not None]
    members = Counter(sample.group_id for sample in scored)
    return [sample for sample in scored if members[sample.group_id] >= config.algorithm.least_group]


def dropped_fraction(kept: Sequence[Sample], drawn: Sequence[Sample], world: World) -> float:
    """The share of a batch, over all ranks, that is not trained on. Collective."""
    trained = world.sum(torch.tensor([len(kept), len(drawn)], dtype=torch.float64))
    return float(1 - trained[0] / trained[1])


def why_unusable(samples: Sequence[Sample], config: Config, world: World) -> str:
    """Why no rank has a usable sample of a scored batch, in words for the person. Collective."""
    rewarded = sum(sample.reward is not None for sample in samples)
    scored, drawn = world.sum(torch.tensor([rewarded, len(samples)])).tolist()
    what = f"{scored} of {drawn} responses got a reward"
    if scored:
        what += f", and no prompt has the {config.algorithm.least_group} that {config.algorithm.name} compares"
    return what


def behaviour_logprobs(samples: Sequence[Sample]) -> Tensor:
    """[T] fp32 log-probabilities the sampler gave, in nats, responses end to end."""
    logprobs = [torch.from_numpy(sample.behaviour_logprobs) for sample in samples]
    return torch.cat(logprobs) if logprobs else torch.empty(0)


def rollout(
    samples: Sequence[Sample], old: Tensor | None, ref: Tensor | None, values: Tensor | None, end_values: Tensor | None
) -> Rollout:
    """A rank's samples as the flat vectors algorithms take."""
    lengths = torch.tensor([0] + [sample.loss_tokens for sample in samples])
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


def objective(config: Config, rollout: Rollout, kl_coef: float, world: World, step: int = 0) -> Objective:
    """The algorithm's objective on a rollout batch, with the off-policy correction where the run has one.

    Where no rank has a response there is nothing to train on and nothing to measure.

    Args:
        kl_coef: current coefficient of the KL penalty, per nat.
        step: rollout batches trained on before this one.
    """
    if not world.max(len(rollout.scores)):
        return Objective(units=every_response(rollout), normalise=by_token, loss={})

    def gather(vector: Tensor) -> tuple[Tensor, slice]:
        parts = world.gather(vector)
        first = sum(len(part) for part in parts[: world.rank])
        return torch.cat(parts), slice(first, first + len(vector))

    run = Run(
        step=step,
        kl_coef=kl_coef,
        kl_estimator=config.kl.estimator or config.algorithm.kl_estimator,
        max_response_tokens=config.rollout.max_response_tokens,
        reduce=world.sum,
        gather=gather,
    )
    result = config.algorithm.objective(rollout, config.algorithm_settings, run)
    if fault := _fault(config, rollout, result):
        raise ValueError(f"{config.algorithm.name}: the objective {fault}")
    if off_policy.corrects(config):
        result.loss["is_cap"] = config.off_policy.cap
    return result


def _fault(config: Config, rollout: Rollout, objective: Objective) -> str | None:
    """Where an objective wants what its algorithm's record does not say, so that the engine has not provided it."""
    record, loss = config.algorithm, objective.loss
    if objective.compares_pairs != (record.rows == "pair"):
        return f"has units of {objective.units.shape[1]} responses, and its record says rows = {record.rows!r}"
    if (objective.score_loss is not None) != (record.head == "score"):
        return f"must have a score_loss if a reward model is trained, and its record says head = {record.head!r}"
    if (objective.returns is not None) != record.value_model:
        return f"must have returns if there is a value model, and its record says value_model = {record.value_model}"
    if loss.get("kl_coef") and rollout.ref_logprobs is None:
        return "has a KL term, and there is no reference: its record must say kl = 'loss' or reference = True"
    if loss.get("loss") == "clip" and not record.policy_ratio:
        return "has a policy ratio: its record must say policy_ratio = True"
    if "ratio" in loss and loss["ratio"] != (by_record := record.ratio(config.algorithm_settings)):
        return f"has a {loss['ratio']} ratio, and its method ratio says {by_record!r}"
    return None


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


def row_metrics(samples: Sequence[Sample], update: dict[str, float], world: World) -> dict[str, float]:
    """What rows of a data set look like, over all ranks, and of an update's metrics those that are about them: a loss
    without a sampled response has no policy ratio. A reward model's loss is of whole sequences."""
    tokens = torch.tensor([float(sample.length) for sample in samples])
    in_loss = torch.tensor([float(sample.loss_tokens) for sample in samples])
    ratios = ("policy/ratio_mean", "policy/clip_fraction", "policy/clamp_fraction")
    return {
        "rows/tokens_mean": global_mean(tokens, world.sum),
        **({"rows/loss_tokens_mean": global_mean(in_loss, world.sum)} if "policy/loss" in update else {}),
        **{name: value for name, value in update.items() if name not in ratios},
    }


def held_out_metrics(samples: Sequence[Sample], config: Config, world: World) -> dict[str, float]:
    """The mean score of this and all ranks' responses to the held-out prompts, a prompt's side by side.

    With several responses a prompt also ``eval/pass@k``: the share of prompts with a right one among the k, or the mean
    of their best scores. Beside each its standard error over prompts, ``..._stderr``. Nothing where every response of
    every rank was dropped.
    """
    scores = torch.tensor([one.reward_parts["score"] for one in samples if one.reward is not None])
    if not world.max(len(scores)):
        return {}
    k = config.eval.samples_per_prompt
    prompts = [samples[i : i + k] for i in range(0, len(samples), k)]
    scored = [[one.reward_parts["score"] for one in prompt if one.reward is not None] for prompt in prompts]
    scored = [prompt for prompt in scored if prompt]
    found = {config.eval_metric: global_mean(scores, world.sum)}
    found |= _stderr(config.eval_metric, [sum(prompt) / len(prompt) for prompt in scored], world)
    if k > 1:
        name, best = f"eval/{'pass' if config.has_verifier else 'best'}@{k}", [max(prompt) for prompt in scored]
        found[name] = global_mean(torch.tensor(best), world.sum)
        found |= _stderr(name, best, world)
    return found


def _stderr(name: str, values: Sequence[float], world: World) -> dict[str, float]:
    """``NAME_stderr``, the standard error of the mean of one value a prompt; nothing for fewer than two prompts."""
    stderr = global_stderr(torch.tensor(values, dtype=torch.float64), world.sum)
    return {} if stderr is None else {f"{name}_stderr": stderr}
