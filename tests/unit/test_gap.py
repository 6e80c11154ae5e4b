"""The distance between sampler and trainer over all ranks, against sorting everything in one place."""

import math
import threading

import pytest
import torch

from engine.generation.equal_weights import Gap
from engine.machine.world import World


class Thread(World):
    """One rank of two that are threads."""

    __slots__ = ("barrier", "slots")

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        self.slots[self.rank] = tensor
        self.barrier.wait(10)
        total = self.slots[0] + self.slots[1]
        self.barrier.wait(10)
        return total


def two_ranks(distances: tuple[torch.Tensor, torch.Tensor]) -> list[Gap]:
    barrier, slots, gaps = threading.Barrier(2), {}, {}

    def rank(r: int) -> None:
        world = Thread(r, 2, torch.device("cpu"))
        object.__setattr__(world, "barrier", barrier)
        object.__setattr__(world, "slots", slots)
        base = torch.zeros(len(distances[r]))
        gaps[r] = Gap.between(base, base - distances[r], world)

    threads = [threading.Thread(target=rank, args=(r,)) for r in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [gaps[0], gaps[1]]


@pytest.mark.parametrize("sizes", [(1, 1), (3, 998), (999, 1), (2500, 2501), (0, 7000), (9000, 3)])
def test_mean_and_percentile_are_exact(sizes: tuple[int, int]) -> None:
    """Also where a rank has fewer tokens than the 0.1 percent, or none, and when all the largest are on one."""
    torch.manual_seed(sum(sizes))
    parts = torch.randn(sizes[0]) * 5, torch.randn(sizes[1])
    every = torch.cat(parts).abs().sort().values
    first, second = two_ranks(parts)
    assert first == second
    assert first.mean == pytest.approx(float(every.double().mean()), rel=1e-6)
    assert first.p999 == float(every[max(0, math.ceil(0.999 * len(every) - 1e-9) - 1)])
    means = [float(part.abs().mean()) if len(part) else 0.0 for part in parts]
    assert first.worst_rank == means.index(max(means))


def test_not_a_number_is_a_gap() -> None:
    """It is never below a limit, and its rank is the one to name."""
    gap = two_ranks((torch.ones(5), torch.tensor([0.0, math.nan])))[0]
    assert math.isnan(gap.mean) and gap.worst_rank == 1
