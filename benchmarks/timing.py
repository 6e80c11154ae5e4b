"""Interleaved timing: every implementation once a round, ratios within a round.

A card's speed drifts by a few percent with its temperature and power, so numbers taken one after the other cannot be
divided by each other; those of one round can.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch

from benchmarks.guard import Failure, attempt

ROUNDS = 9
FEWEST_ROUNDS = 3
"""Of a slow implementation that is not one of the pair."""
FLUSH_BYTES = 256 << 20
"""A buffer larger than any L2 is written before a measurement, so that caches start cold."""
HEAD_START = 32
HEAD_START_SIZE = 4096
"""Products of square matrices of this size before a measurement, about 6 ms on an H100: the host runs ahead of the card
as it does in training, so that launches are not what is measured, and the card is as warm as under its load."""
TRIES = 3

Times = dict[str, list[float | None]]
"""Milliseconds of each round; None where the implementation sat it out."""


class Clock(Protocol):
    """Times one call."""

    def measure(self, call: Callable[[], object]) -> float:
        """Milliseconds."""


class CpuClock:
    """Wall-clock time."""

    def measure(self, call: Callable[[], object]) -> float:
        """Milliseconds."""
        start = time.perf_counter()
        call()
        return 1000 * (time.perf_counter() - start)


class CudaClock:
    """Time between two events on the device's stream."""

    def __init__(self) -> None:
        self.buffer = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self.matrix = torch.randn(HEAD_START_SIZE, HEAD_START_SIZE, dtype=torch.bfloat16, device="cuda")
        self.product = torch.empty_like(self.matrix)
        self.start, self.stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def measure(self, call: Callable[[], object]) -> float:
        """Milliseconds; again if the call had to ask the driver for memory, which another one had just given back."""
        for attempts_left in reversed(range(TRIES)):
            before = self._driver_allocations()
            for _ in range(HEAD_START):
                torch.mm(self.matrix, self.matrix, out=self.product)
            self.buffer.zero_()
            self.start.record()
            call()
            self.stop.record()
            self.stop.synchronize()
            if self._driver_allocations() == before or not attempts_left:
                break
        return self.start.elapsed_time(self.stop)

    @staticmethod
    def _driver_allocations() -> int:
        return torch.cuda.memory_stats().get("num_device_alloc", 0)


def round_order(names: list[str], pair: tuple[str, ...], index: int) -> list[str]:
    """The pair first, next to each other and in turns; the others after it, in turns from the front and the back."""
    first = [name for name in pair if name in names]
    others = [name for name in names if name not in pair]
    return first + others if index % 2 == 0 else first[::-1] + others[::-1]


def interleave(
    calls: Mapping[str, Callable[[int], object]],
    clock: Clock,
    *,
    pair: tuple[str, ...],
    condition: Callable[[int], object] | None = None,
    rounds: int = ROUNDS,
    seconds: float = math.inf,
) -> tuple[Times, dict[str, Failure]]:
    """Time every call once a round.

    Args:
        calls: by name; each gets the round's number, to choose its inputs by.
        clock: what times them.
        pair: names whose ratio matters most, measured in every round.
        condition: called untimed at the start of a round, so that the pair follows the same work whatever ran before.
        rounds: how many.
        seconds: after so much measured time of its own, a call that is not of the pair sits the other rounds out.

    Returns:
        The times, and what went wrong: a call that fails takes no further part.
    """
    times: Times = {name: [] for name in calls}
    failures: dict[str, Failure] = {}
    for index in range(rounds):
        if condition is not None:
            condition(index)
        for name in round_order(list(calls), pair, index):
            spent = sum(value for value in times[name] if value is not None) / 1000
            slow = name not in pair and spent > seconds and index >= FEWEST_ROUNDS
            if name in failures or slow:
                times[name].append(None)
                continue
            taken: float | Failure = attempt(partial(clock.measure, partial(calls[name], index)))
            if isinstance(taken, Failure):
                failures[name] = taken
            times[name].append(None if isinstance(taken, Failure) else taken)
    return times, failures


def quantile(values: list[float], fraction: float) -> float:
    """Between the two nearest values."""
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def paired_ratios(times: list[float | None], base: list[float | None]) -> list[float]:
    """Quotients of the rounds in which both were measured."""
    pairs = zip(times, base, strict=True)
    return [value / reference for value, reference in pairs if value is not None and reference is not None]


def median_ratio(times: list[float | None], base: list[float | None] | None) -> float | None:
    """Median of :func:`paired_ratios`; None without any."""
    ratios = paired_ratios(times, base) if base is not None else []
    return statistics.median(ratios) if ratios else None
