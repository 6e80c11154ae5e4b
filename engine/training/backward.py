"""Forward and backward passes of a microbatch, by the losses of policy, value model and reward model, and what they
measure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from algorithms.base import ValueModelSettings
from algorithms.rollout import Objective
from algorithms.value import value_loss
from engine.config.learning import Train
from engine.sample import Sample
from engine.training import zero
from engine.training.averages import Averages
from engine.training.packing import Microbatch


def policy_pass(
    policy: DeepSpeedEngine,
    batch: Microbatch,
    weight: Tensor,
    row: dict[str, Tensor],
    objective: Objective,
    train: Train,
    head_options: dict[str, Any],
    averages: Averages,
) -> tuple[Tensor, Tensor]:
    """Accumulates the gradient of the algorithm's loss.

    Args:
        weight: [R] fp32, of the microbatch's tokens in the loss, or [P] of its pairs.
        row: [R] fp32 vectors of these tokens, by name as in ``Trainer.update``.
        head_options: of the policy's head: temperature, workspace and backend.

    Returns:
        the microbatch's part of the loss, and the [R] fp32 log-probabilities.
    """
    old, counts = row.get("old_logprobs"), batch.counts
    scale = zero.loss_scale(policy)  # before the kernels round the head's gradients
    weight = weight * scale
    outputs = policy(batch, loss_arguments(batch, weight, row, objective, train), **head_options)
    zero.backward(policy, outputs[0])
    rows = len(batch.rows) * counts
    if objective.compares_pairs:
        loss, logprobs, *_, entropy, losses = outputs
        for name, values in measured_pairs(outputs).items():
            averages.add(f"policy/{name}", values.sum() * counts, len(losses) * counts)
    else:
        loss, logprobs, entropy, ratio, clipped, clamped, _ = outputs
        averages.add("policy/ratio_mean", ratio.sum() * counts, rows)
        averages.add("policy/clip_fraction", clipped.sum() * counts, rows)
        averages.add("policy/clamp_fraction", clamped.sum() * counts, rows)
    averages.add("policy/entropy", entropy.sum() * counts, rows)
    change = torch.zeros_like(logprobs) if old is None else old - logprobs
    k3 = change.exp() - 1 - change  # KL(old || new) from samples of old (Schulman 2020)
    averages.add("policy/kl_old", k3.sum() * counts, rows)
    averages.add("policy/log_ratio_abs", change.abs().sum() * counts, rows)
    return loss.detach() / scale, logprobs


def measured_pairs(outputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """What is told of a microbatch's pairs, [P] each, by the outputs of ``kernels.linear_preference_loss``."""
    _, _, chosen, rejected, margins, *_ = outputs
    return {
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "margin": margins,
        "pair_accuracy": (margins > 0).float(),
    }


def loss_arguments(
    batch: Microbatch, weight: Tensor, row: dict[str, Tensor], objective: Objective, train: Train
) -> dict[str, Any]:
    """What the loss takes of a microbatch beside the head's rows; arguments as of ``policy_pass``."""
    if objective.compares_pairs:
        arguments = {"pair_weights": weight, "ref_logprobs": row["ref_logprobs"], **objective.loss}
    else:
        arguments = _policy_arguments(weight, row, objective.loss, train)
    return arguments | {"cu_seqlens": batch.cu_seqlens}


def _policy_arguments(weight: Tensor, row: dict[str, Tensor], loss: dict[str, Any], train: Train) -> dict[str, Any]:
    """What ``kernels.linear_policy_loss`` takes: its constants and the microbatch's rows."""
    arguments: dict[str, Any] = {
        "advantages": row.get("advantages"),
        "token_weights": weight,
        "old_logprobs": row.get("old_logprobs"),
        "clip_low": train.clip_low,
        "clip_high": train.clip_high,
        "entropy_coef": train.entropy_coef,
        **loss,
    }
    if loss.get("kl_coef"):
        arguments["ref_logprobs"] = row["ref_logprobs"]
    if "is_cap" in loss:
        arguments["behaviour_logprobs"] = row["sampler_logprobs"]
    return arguments


def score_pass(
    reward_model: DeepSpeedEngine,
    batch: Microbatch,
    weight: Tensor,
    samples: Sequence[Sample],
    objective: Objective,
    averages: Averages,
) -> Tensor:
    """Accumulates the gradient of a reward model's loss; gives the microbatch's part of the loss.

    Args:
        weight: [P] fp32, of the microbatch's pairs.
        samples: this rank's.
    """
    losses, chosen, rejected = score_losses(reward_model, batch, samples, objective)
    loss = (losses * weight).sum()
    zero.backward(reward_model, loss * zero.loss_scale(reward_model))
    pairs = len(losses) * batch.counts
    for name, values in measured_scores(chosen.detach(), rejected.detach()).items():
        averages.add(f"reward_model/{name}", values.sum() * batch.counts, pairs)
    return loss.detach()


def score_losses(
    reward_model: DeepSpeedEngine, batch: Microbatch, samples: Sequence[Sample], objective: Objective
) -> tuple[Tensor, Tensor, Tensor]:
    """[P] fp32 losses of a microbatch's pairs, and the scores of their chosen and rejected responses."""
    chosen, rejected = reward_model(batch).view(-1, 2).unbind(1)
    margins = torch.zeros_like(chosen)  # a placeholder's pair has no row to ask for one
    if batch.counts:
        margins = torch.tensor([samples[place].margin for place in batch.indices[::2]]).to(chosen)
    assert objective.score_loss is not None
    return objective.score_loss(chosen, rejected, margins), chosen, rejected


def measured_scores(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """What is told of a reward model's scores, [P] each: whether a pair's are in order, their difference and mean."""
    return {
        "accuracy": (chosen > rejected).float(),
        "reward_margin": chosen - rejected,
        "reward_mean": (chosen + rejected) / 2,
    }


def value_pass(
    value: DeepSpeedEngine,
    batch: Microbatch,
    weight: Tensor,
    row: dict[str, Tensor],
    settings: ValueModelSettings,
    averages: Averages,
) -> None:
    """Accumulates the gradient of the value loss; arguments as of ``policy_pass``."""
    values, _ = value(batch)
    losses, clipped = value_loss(values, row["old_values"], row["returns"], settings.value_clip)
    loss = settings.value_coef * (losses * weight).sum()
    zero.backward(value, loss * zero.loss_scale(value))
    rows = len(batch.rows) * batch.counts
    averages.add("value/loss", losses.sum() * batch.counts, rows)
    averages.add("value/clip_fraction", clipped.sum() * batch.counts, rows)
