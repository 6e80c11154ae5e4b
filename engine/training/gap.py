"""How far the sampler's and the trainer's log-probabilities of the sampled tokens are apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.machine.world import World


@dataclass(frozen=True, slots=True)
class Gap:
    """Absolute log-probability differences over all ranks' tokens, in nats."""

    mean: float
    p999: float
    """The smallest difference that at least 99.9 % of the tokens stay within."""
    worst_rank: int
    """The rank with the largest mean."""

    @classmethod
    def between(cls, sampler: Tensor, trainer: Tensor, world: World) -> Gap:
        """From a rank's [T] log-probabilities on either side; T may differ between ranks. Collective.

        Exact: of the 0.1 % largest every rank sends its own, which are few.
        """
        distances = (sampler - trainer).abs().to(world.device)
        size = distances.new_full((), len(distances), dtype=torch.float64)
        sums = _gather(torch.stack([distances.double().sum(), size]), world)
        total, count = sums.sum(0).tolist()
        above = int(count) // 1000 + 1  # the percentile's rank, counted from the largest
        largest = distances.new_zeros(above, dtype=torch.float64)
        own = distances.double().topk(min(above, len(distances))).values
        largest[: len(own)] = own
        p999 = _gather(largest, world).flatten().topk(above).values[-1]
        means = (sums[:, 0] / sums[:, 1].clamp(min=1)).nan_to_num(nan=torch.inf)
        return cls(total / max(count, 1), float(p999), int(means.argmax()))


def _gather(row: Tensor, world: World) -> Tensor:
    """Every rank's row [n], as [ranks, n] float64."""
    table = torch.zeros(world.size, len(row), dtype=torch.float64, device=world.device)
    table[world.rank] = row
    return world.sum(table)
