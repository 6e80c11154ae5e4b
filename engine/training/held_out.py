"""What the policy, or the reward model, makes of held-out rows: the algorithm's loss on them, with no gradient."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from algorithms.rollout import Objective, global_mean, global_stderr
from engine.sample import Sample
from engine.training.averages import Averages
from engine.training.backward import loss_arguments, measure_pairs, measured_scores, score_losses
from engine.training.minibatch import loss_weights
from engine.training.packing import microbatches
from engine.training.token_store import TokenStore
from engine.training.trainer import Trainer


@torch.no_grad()
def measure(trainer: Trainer, samples: Sequence[Sample], ref: Tensor | None, objective: Objective) -> dict[str, float]:
    """The objective's loss over all ranks' samples as ``eval/loss``, and what people read it by. Collective.

    Of a likelihood that is ``eval/perplexity``, exp of the loss, and ``eval/token_accuracy``, the share of tokens that
    are the policy's most likely ones; of pairs, what ``policy/...`` or ``reward_model/...`` has while training, the
    latter with standard errors over pairs.

    Args:
        samples: this rank's; it may have none, though not every rank.
        ref: [T] fp32, nats, of the frozen reference, where the loss takes it.
    """
    if objective.score_loss is not None:
        return _measure_scores(trainer, samples, objective)
    train, world, pairs = trainer.config.train, trainer.world, objective.compares_pairs
    averages, store = Averages(world), TokenStore(samples)
    batches = microbatches(samples, objective.units, train.tokens_per_microbatch, world)
    weights = loss_weights(batches, objective.normalise, world)
    assert weights is not None, "held-out rows without a token in the loss are refused where they are read"
    trainer.policy.eval()
    losses = []
    for batch, weight in zip(batches, weights, strict=True):
        row = {} if ref is None else {"ref_logprobs": store.take(ref, batch)}
        arguments = loss_arguments(batch, weight, row, objective, train)
        loss, *outputs = trainer.policy(batch, arguments, most_likely=not pairs, **trainer.head_options)
        losses.append(loss)
        if pairs:
            measure_pairs(outputs, batch, averages, "")
        else:
            averages.add("token_accuracy", outputs[-1].sum() * batch.counts, len(batch.rows) * batch.counts)
    averages.add("loss", torch.stack(losses).sum() / world.size, 1.0 / world.size)
    found = averages.means()
    if not pairs:
        found["perplexity"] = math.exp(min(found["loss"], 700.0))
    return {f"eval/{name}": value for name, value in found.items()}


def _measure_scores(trainer: Trainer, samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
    """Loss, accuracy, margin and mean of a reward model, and ``..._stderr`` of each where there are several pairs."""
    batches = microbatches(samples, objective.units, trainer.config.train.tokens_per_microbatch, trainer.world)
    trainer.policy.eval()
    values: dict[str, list[Tensor]] = defaultdict(list)
    for batch in batches:
        losses, chosen, rejected = score_losses(trainer.policy, batch, samples, objective)
        pairs = len(losses) * batch.counts  # none of a placeholder's
        for name, each in ({"loss": losses} | measured_scores(chosen, rejected)).items():
            values[name].append(each[:pairs].cpu())
    found: dict[str, float] = {}
    for name, parts in values.items():
        found[f"eval/{name}"] = global_mean(torch.cat(parts), trainer.world.sum)
        if (stderr := global_stderr(torch.cat(parts), trainer.world.sum)) is not None:
            found[f"eval/{name}_stderr"] = stderr
    return found
