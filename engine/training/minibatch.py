"""Minibatches: which units an optimizer step trains on, in which microbatches, with which weights."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms.normalise import Normalise
from algorithms.rollout import Objective
from engine.config import Config
from engine.machine.world import World
from engine.sample import Sample
from engine.training.packing import Microbatch, microbatches


@dataclass(frozen=True, slots=True)
class Minibatch:
    """What this rank does in one planned optimizer step."""

    units: Tensor
    """[U, n] which samples, each row together."""
    batches: list[Microbatch]
    weights: list[Tensor] | None
    """Of each microbatch the [R] fp32 weights of its tokens in the loss, or [P] of its pairs; None where there is
    nothing to train on, on no rank, and no step to make."""


def minibatches(
    config: Config, samples: Sequence[Sample], objective: Objective, step: int, world: World
) -> Iterator[Minibatch]:
    """The minibatches of an update, epoch by epoch. Collective.

    The run's seed, ``step`` (rollout batches trained on before), the epoch and the rank fix which units are in which.
    """
    train = config.train
    for epoch in range(train.epochs_per_batch):
        order = list(range(len(objective.units)))
        random.Random(f"{config.seed}/{step}/{epoch}/{world.rank}").shuffle(order)
        for number in range(train.minibatches_per_batch):
            share = slice(*(len(order) * (number + i) // train.minibatches_per_batch for i in (0, 1)))
            units = objective.units[order[share]]
            batches = microbatches(samples, units, train.tokens_per_microbatch, world)
            yield Minibatch(units, batches, loss_weights(batches, objective.normalise, world))


def loss_weights(batches: Sequence[Microbatch], normalise: Normalise, world: World) -> list[Tensor] | None:
    """The weights of each microbatch's tokens or pairs in the loss of their minibatch; None if there is none anywhere.

    They are multiplied by the number of ranks because DeepSpeed averages gradients over ranks. Collective.
    """
    parts = [normalise(batch.cu_seqlens.diff().to(batch.rows.device)) for batch in batches]
    divisors = [part.divisor * batch.counts for part, batch in zip(parts, batches, strict=True)]
    divisor = float(world.sum(torch.stack(divisors).sum() if divisors else torch.zeros((), dtype=torch.float64)))
    if not divisor:
        return None
    scale = world.size / divisor
    return [(part.terms * batch.counts * scale).float() for part, batch in zip(parts, batches, strict=True)]
