"""How sampler and trainer prove that they hold the same weights and compute the same with them.

After every hand-over the digests of what lies in the sampler are compared with those of what was sent, tensor by tensor
(``SentWeights``, ``Receipt``): that sees one tensor which was not updated, at any learning rate. That both compute the
same with the weights is another proof. Where samples are as old as the trainer's weights, their own log-probabilities
are that proof (``Gap``). A sampler that runs ahead never gives such samples; it is asked for the log-probabilities of a
few fixed responses after every hand-over instead (``LogprobProof``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.machine.world import World
from engine.models import digest
from engine.sample import Sample

if TYPE_CHECKING:
    from engine.generation.base import NamedTensors, Text

AsHeld = Callable[[str, Tensor], Tensor | None]
Held = dict[str, list[Tensor]]
"""Digests of what lies in a sampler, by transformers' names: of each copy of a tensor that it computes with."""
NAMED = 4
"""Most tensors that a message names."""


class HandOverError(RuntimeError):
    """The sampler does not hold the weights that it was handed, or gives other tokens by the same ones."""


class WeightsDisagreeError(RuntimeError):
    """Sampler and trainer give different log-probabilities to the same tokens: they do not hold the same weights."""


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


class SentWeights:
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
        held_values = values({name: copies[name] for name in names})
        lost = [
            name
            for name, value in zip(names, expected, strict=True)
            if any(copy != value for copy in held_values[name])
        ]
        if version == 0:
            own_form = [name for name in lost if built.get(name) == held_values[name]]
            unread += own_form
            lost = [name for name in lost if name not in own_form]
        sent = {name: value for name, value in zip(names, arrived, strict=True) if name not in unread}
        return Receipt(version, sent, lost, list(unread), self._seconds + time.perf_counter() - started)


def values(held: Held) -> dict[str, list[int]]:
    """The digests' values; waits for their device once."""
    read = iter(digest.read([one for copies in held.values() for one in copies]))
    return {name: [next(read) for _ in copies] for name, copies in held.items()}


def lost(version: int, names: Sequence[str]) -> HandOverError:
    """The error of a hand-over that left these tensors of the sampler with other numbers than were sent."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return HandOverError(
        f"after the hand-over of policy version {version} the sampler does not hold what it was sent in {len(names)} "
        f"tensor(s): {', '.join(names[:NAMED])}{more}: its loader lost or changed them. Resume from the last "
        "checkpoint; if it happens again, with generation.backend hf"
    )


def unread(names: Sequence[str]) -> str:
    """What a person is told at start of tensors that no digest is compared of."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return (
        f"{len(names)} tensor(s) cannot be read back from the sampler in the form that they are sent in, so that "
        "log-probabilities alone check their hand-over (weights/unread_tensors): "
        f"{', '.join(names[:NAMED])}{more}"
    )


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

    def check(self, limit: float, samples: Sequence[Sample], step: int) -> dict[str, float]:
        """The metrics of a gap that the samples of a step have, ``step`` rollout batches having been trained on before.

        Raises:
            WeightsDisagreeError: the mean is above ``limit``, which is ``generation.max_logprob_gap``.
        """
        if not self.mean <= limit:
            versions = sorted({sample.policy_version for sample in samples})
            raise _disagree(
                f"step {step + 1}: the log-probabilities of the sampler, at policy version "
                f"{', '.join(map(str, versions))}, differ from the trainer's by {self.mean:.4f} nats a token on "
                f"average (99.9 percent of the tokens within {self.p999:.4f}; rank {self.worst_rank} is the furthest "
                "off)",
                limit,
            )
        return {"weights/logprob_gap_mean": self.mean, "weights/logprob_gap_p999": self.p999}


class LogprobProof:
    """Texts to compute log-probabilities of, at temperature 1: some prompts and a sampler's greedy responses to them.

    Args:
        prompts, responses: token ids.
        limit: on the mean difference: ``generation.max_logprob_gap``.
    """

    def __init__(self, prompts: Sequence[list[int]], responses: Sequence[list[int]], limit: float) -> None:
        self.texts: list[Text] = list(zip(prompts, responses, strict=True))
        self._limit = limit
        self.samples = [Sample(i, i, prompt, response_ids=answer) for i, (prompt, answer) in enumerate(self.texts)]

    def check(self, trainers: np.ndarray, samplers: Sequence[np.ndarray], version: int) -> dict[str, float]:
        """Compares the trainer's log-probabilities, [T], with the sampler's of each response; gives the metrics.

        Raises:
            WeightsDisagreeError: the mean difference is above the limit.
        """
        gap = np.abs(np.concatenate(samplers) - trainers)
        if not gap.mean() <= self._limit:
            raise _disagree(
                f"after the hand-over of policy version {version} the log-probabilities of the sampler differ from the "
                f"trainer's by {gap.mean():.4f} nats a token on average (at most {gap.max():.4f})",
                self._limit,
            )
        return {"weights/logprob_gap_mean": float(gap.mean()), "weights/logprob_gap_max": float(gap.max())}


def _disagree(difference: str, limit: float) -> WeightsDisagreeError:
    return WeightsDisagreeError(
        f"{difference}, more than generation.max_logprob_gap = {limit}: they do not hold the same weights, or compute "
        "too differently"
    )


def _gather(row: Tensor, world: World) -> Tensor:
    """Every rank's row [n], as [ranks, n] float64."""
    table = torch.zeros(world.size, len(row), dtype=torch.float64, device=world.device)
    table[world.rank] = row
    return world.sum(table)
