"""What a sampler holds after a hand-over against what it was sent, tensor by tensor, by their digests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.models import digest

if TYPE_CHECKING:
    from torch import Tensor

    from engine.generation.base import NamedTensors

AsHeld = Callable[[str, "Tensor"], "Tensor | None"]
Held = dict[str, list["Tensor"]]
"""Digests of what lies in a sampler, by transformers' names: of each copy of a tensor that it computes with."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """Of one hand-over."""

    version: int
    """Number of updates that the weights have seen."""
    sent: dict[str, int]
    """Digests of the tensors that were compared, as they arrived."""
    lost: list[str]
    """Tensors that the sampler does not hold as they were sent."""
    unread: list[str]
    """Tensors that cannot be read back, and so were not compared."""
    seconds: float
    """Spent on digests by the host. Includes waiting for a GPU, but for what it digests while the tensors arrive."""

    @property
    def metrics(self) -> dict[str, float]:
        """Of the step that the hand-over is part of."""
        return {
            "weights/digest_tensors": float(len(self.sent)),
            "weights/unread_tensors": float(len(self.unread)),
            "time/digest": self.seconds,
        }


class Sent:
    """Passes a stream of tensors on and takes each one's digest before the sampler gets it.

    Args:
        as_held: gives a tensor of that name as the sampler is to hold it, or None where that is not compared.
    """

    def __init__(self, weights: NamedTensors, as_held: AsHeld) -> None:
        self._weights, self._as_held = weights, as_held
        self._arrived: dict[str, Tensor] = {}
        self._expected: dict[str, Tensor] = {}
        self._seconds = 0.0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._weights:
            started = time.perf_counter()
            if (expected := self._as_held(name, tensor)) is not None:
                self._arrived[name] = self._expected[name] = digest.digest(tensor)
                if expected is not tensor:
                    self._expected[name] = digest.digest(expected)
            self._seconds += time.perf_counter() - started
            yield name, tensor

    def receipt(
        self, version: int, held: Callable[[], Held], unread: list[str], built: dict[str, list[int]]
    ) -> Receipt:
        """Compares with what the sampler holds. Waits for a GPU once.

        Args:
            held: reads the sampler. A tensor that is not among its answer is not compared.
            unread: names that cannot be read; grows by those that turn out so.
            built: what ``held`` gave when the sampler had loaded its first weights, those of version 0, by itself. What
                differs from version 0 just as it did then is no loss: the sampler keeps it in a form of its own.
        """
        started = time.perf_counter()
        copies = held()
        names = [name for name in self._expected if name in copies]
        arrived = digest.read([self._arrived[name] for name in names])
        expected = digest.read([self._expected[name] for name in names])
        found = values({name: copies[name] for name in names})
        lost = [name for name, value in zip(names, expected, strict=True) if any(one != value for one in found[name])]
        if version == 0:
            own_form = [name for name in lost if built.get(name) == found[name]]
            unread += own_form
            lost = [name for name in lost if name not in own_form]
        sent = {name: value for name, value in zip(names, arrived, strict=True) if name not in unread}
        return Receipt(version, sent, lost, list(unread), self._seconds + time.perf_counter() - started)


def values(held: Held) -> dict[str, list[int]]:
    """The digests' values; waits for their device once."""
    read = iter(digest.read([one for copies in held.values() for one in copies]))
    return {name: [next(read) for _ in copies] for name, copies in held.items()}
