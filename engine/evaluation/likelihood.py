"""Log-probabilities of given responses by a model, packed and through the loss head as in training."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.config import Config
from engine.machine.world import World
from engine.sample import Sample
from engine.training import models
from engine.training.packing import microbatches

TOKENS = 8192
"""Of a forward pass, unless one sequence has more."""


@torch.no_grad()
def sums(path: str, samples: Sequence[Sample], config: Config, world: World) -> list[float]:
    """The log-probability of each response given its prompt, in nats at temperature 1, by the model in a folder.

    Args:
        config: its ``model.dtype`` is what the model computes in.
    """
    check = models.Check(f"'{path}'", world.device)
    policy = models.load_policy(path, dtype=getattr(torch, config.model.dtype), check=check).to(world.device).eval()
    found = [0.0] * len(samples)
    singles = torch.arange(len(samples))[:, None]
    budget = max([TOKENS, *(sample.length for sample in samples)])
    for batch in microbatches(samples, singles, budget, world):
        rows = policy(batch).double().cpu()
        for i, index in enumerate(batch.indices):
            found[index] = float(rows[batch.cu_seqlens[i] : batch.cu_seqlens[i + 1]].sum())
    return found
