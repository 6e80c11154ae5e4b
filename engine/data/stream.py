"""Shuffled epochs over prompts or rows, of one data set or of a mixture, with a cursor that a checkpoint can hold."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import accumulate, chain
from typing import Generic, NamedTuple, TypeVar

import numpy as np

Item = TypeVar("Item")


class Stream(Generic[Item]):
    """Endless shuffled epochs over some items (the ``repeat_generator`` of async_rlhf, with a cursor).

    The order of an epoch depends on the seed and the epoch's number alone, so ``cursor`` (items taken so far) is all
    the state there is: setting it continues where another process stopped.
    """

    def __init__(self, items: Sequence[Item], seed: int | str, shuffle: bool = True) -> None:
        assert items, "data without a usable row is refused where it is read"
        self._items, self._seed, self._shuffle = items, seed, shuffle
        self._order: tuple[int, list[int]] = (-1, [])
        self.cursor = 0

    def epochs(self, cursor: int) -> float:
        """Passes over the data when so many items have been taken."""
        return cursor / len(self._items)

    def ahead(self, count: int) -> list[Item]:
        """Those among the next ``count`` items, each once."""
        if count >= len(self._items):
            return list(self._items)
        items = (self.at(position) for position in range(self.cursor, self.cursor + count))
        return list({id(item): item for item in items}.values())

    def take(self, count: int) -> list[Item]:
        """The next ``count`` items; every one of an epoch comes once before any comes again."""
        batch = [self.at(position) for position in range(self.cursor, self.cursor + count)]
        self.cursor += count
        return batch

    def at(self, position: int) -> Item:
        """The item that so many come before."""
        epoch, index = divmod(position, len(self._items))
        return self._items[self._epoch_order(epoch)[index]]

    def _epoch_order(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            order = list(range(len(self._items)))
            if self._shuffle:
                random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1]


class Part(NamedTuple, Generic[Item]):
    """What is taken of one source of a mixture."""

    name: str
    weight: float
    items: list[Item]


class Mixed(list[Item]):
    """The items of several sources, end to end."""

    def __init__(self, parts: Iterable[Part[Item]]) -> None:
        self.parts = list(parts)
        super().__init__(chain.from_iterable(part.items for part in self.parts))

    def shares(self) -> list[Fraction]:
        """The share of each source in what is taken, exactly."""
        weights = [Fraction(part.weight) for part in self.parts]
        return [weight / sum(weights) for weight in weights]

    def line(self, taken: int) -> str:
        """In words: how much there is of each source, and how often it is passed over when so many are taken."""
        words = []
        for part, share in zip(self.parts, map(float, self.shares()), strict=True):
            passes = share * taken / len(part.items)
            words.append(f"{share:.1%} of {part.name}, {passes:.3g} passes over its {len(part.items)} rows")
        return f"mixture  {'; '.join(words)}"


def over(items: Sequence[Item], seed: int, shuffle: bool = True) -> Stream[Item]:
    """The stream of a run's items, which are a data set's or a mixture's."""
    return Mixture(items, seed, shuffle) if isinstance(items, Mixed) else Stream(items, seed, shuffle)


GOLDEN = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: its multiples modulo 2**64 lie as evenly as multiples of one number can, in every run of
neighbours (Knuth, vol. 3, 6.4, theorem S)."""
BLOCK = 4096
"""Positions whose sources are found at a time."""


class Mixture(Stream[Item]):
    """Items of several sources in proportion to their weights, each in shuffled epochs of its own.

    Which source a position is of follows from the seed and the position alone: the position's multiple of ``GOLDEN``
    falls into the source's share of all 2**64 numbers. So every stretch of n positions has n times the share of each,
    give or take four at most (n up to 4 million; one in 8, two or three in 64), and ``cursor`` is again all the state
    there is. ``epochs`` counts what was taken over what the sources have together.
    """

    def __init__(self, items: Mixed[Item], seed: int, shuffle: bool = True) -> None:
        super().__init__(items, seed, shuffle)
        self._streams = [Stream(one.items, f"{seed}/source {i}", shuffle) for i, one in enumerate(items.parts)]
        ends = list(accumulate(items.shares()))[:-1]
        self._ends = np.array([int(end * 2**64) for end in ends], np.uint64)
        self._offset = random.Random(f"{seed}/mixture").getrandbits(64)
        self._before = [np.zeros(len(items.parts), np.int64)]  # how many of each source come before a block
        self._block = (-1, np.empty(0, np.int64), np.empty(0, np.int64))

    def ahead(self, count: int) -> list[Item]:
        items = (self.at(position) for position in range(self.cursor, self.cursor + count))
        return list({id(item): item for item in items}.values())

    def at(self, position: int) -> Item:
        block, place = divmod(position, BLOCK)
        if self._block[0] != block:
            self._block = (block, *self._places(block))
        _, sources, places = self._block
        return self._streams[sources[place]].at(int(places[place]))

    def _places(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """[BLOCK] int64: the source of each position of a block, and how many of that source come before it."""
        for done in range(len(self._before), block + 1):
            counts = np.bincount(self._sources(done - 1), minlength=len(self._streams))
            self._before.append(self._before[-1] + counts)
        sources = self._sources(block)
        places = np.empty(BLOCK, np.int64)
        for number, before in enumerate(self._before[block]):
            own = sources == number
            places[own] = before + np.arange(own.sum())
        return sources, places

    def _sources(self, block: int) -> np.ndarray:
        positions = np.arange(block * BLOCK, (block + 1) * BLOCK, dtype=np.uint64)
        numbers = positions * np.uint64(GOLDEN) + np.uint64(self._offset)
        return np.searchsorted(self._ends, numbers, side="right")
