"""Shuffled epochs over prompts or rows, with a cursor that a checkpoint can hold."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Stream(Generic[Item]):
    """Endless shuffled epochs over some items (the ``repeat_generator`` of async_rlhf, with a cursor).

    The order of an epoch depends on the seed and the epoch's number alone, so ``cursor`` (items taken so far) is all
    the state there is: setting it continues where another process stopped.
    """

    def __init__(self, items: Sequence[Item], seed: int, shuffle: bool = True) -> None:
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
