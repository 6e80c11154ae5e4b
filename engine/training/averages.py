"""Metrics as global means, without a host synchronisation before the end."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from engine.machine.world import World


class Averages:
    """Running sums and weights by name on this rank; means over all ranks at the end.

    Every rank must add to the same names.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._sums: dict[str, list[Tensor]] = defaultdict(list)
        self._weights: dict[str, float] = defaultdict(float)

    def add(self, name: str, total: Tensor, weight: float) -> None:
        """Adds a sum (a scalar tensor) of ``weight`` elements."""
        self._sums[name].append(total.detach().double())
        self._weights[name] += weight

    def add_equal(self, name: str, value: float) -> None:
        """Adds one element whose value every rank knows."""
        share = 1.0 / self._world.size
        self.add(name, torch.tensor(value * share, device=self._world.device), share)

    def means(self) -> dict[str, float]:
        """The mean of every name over all ranks. Collective."""
        names = sorted(self._sums)
        if not names:
            return {}
        sums = torch.stack([torch.stack(self._sums[name]).sum() for name in names])
        weights = torch.tensor([self._weights[name] for name in names], dtype=torch.float64, device=sums.device)
        sums, weights = self._world.sum(torch.stack([sums, weights]))
        return dict(zip(names, (sums / weights.clamp(min=1e-12)).tolist(), strict=True))
