"""Generation one batch ahead of training, on the same devices at the same time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from engine.rollouts.source import Batch, Source
from engine.sample import Sample
from engine.schedules.base import Turns
from engine.schedules.colocation import Colocation
from engine.schedules.proof import Proof


class Overlapping(Turns):
    """On the same devices at the same time: a thread draws the next batch while this one is trained on.

    The sampler takes new weights between two batches, when the trainer is between two updates: each batch, but the
    first, is drawn from weights of one update before those it is trained on.
    """

    def __init__(self, pair: Colocation, source: Source, proof: Proof, steps: int) -> None:
        self._pair, self._source, self._proof, self._steps = pair, source, proof, steps
        self._cursor = 0
        self._proved: dict[str, float] = {}
        self.trainer, self.plan = pair.trainer, pair.plan
        self._version = pair.generator.version
        self._next: Future[Batch] | None = None
        self._finished = time.perf_counter()
        self._idle_share = 0.0
        device = next(pair.trainer.policy.module.parameters()).device
        gpu = device if device.type == "cuda" else None
        # On a stream of its own, before the trainer's: a token takes many short kernels, which would each wait for all
        # that the trainer has queued.
        self._stream = torch.cuda.Stream(gpu, priority=-1) if gpu else None
        use_gpu = (lambda: torch.cuda.set_device(gpu)) if gpu else None
        self._thread = ThreadPoolExecutor(1, "tandem-sampler", use_gpu)

    def sample(self, step: int) -> Batch:
        if self._next is None:  # the run's first batch, or a resumed one's with nothing in flight
            self._renew()
        batch = self._next.result() if self._next else self._draw(step, self._cursor)
        self._cursor, self._next = batch.cursor, None
        self._renew()
        if step + 1 < self._steps:
            if self._stream:
                self._stream.wait_stream(torch.cuda.current_stream())
            self._next = self._thread.submit(self._draw, step + 1, batch.cursor)
        busy = batch.seconds + batch.idle_seconds
        self._idle_share = batch.idle_seconds / busy if busy else 0.0
        return batch

    def _draw(self, step: int, cursor: int) -> Batch:
        idle = time.perf_counter() - self._finished
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            batch = self._source.batch(self._pair.generator, step, cursor)
            if self._stream:
                self._stream.synchronize()
        batch.idle_seconds, self._finished = idle, time.perf_counter()
        return batch

    def _renew(self) -> None:
        generator = self._pair.generator
        if generator.version != self._version:
            self._pair.hand_over(self._version)
            expected = self._proof.expected(self.trainer)
            self._proved = self._proof.check(expected, generator.logprobs(self._proof.texts), self._version)
            self._proved |= self._pair.metrics

    def hand_over(self, version: int) -> None:
        self._version = version

    def held_out(self) -> list[Sample]:
        self.in_flight()
        self._renew()
        samples = self._source.held_out(self._pair.generator)
        self._finished = time.perf_counter()
        return samples

    def in_flight(self, wait: bool = True) -> list[Batch]:
        return [self._next.result()] if self._next else []

    def resume(self, batches: Sequence[Batch], step: int, cursor: int) -> None:
        self._cursor = cursor
        if batches:
            self._next = Future()
            self._next.set_result(batches[0])

    def metrics(self, step_seconds: float, waited: float) -> dict[str, float]:
        found = self._proved | {"idle/generate": self._idle_share, "idle/train": waited / step_seconds}
        self._proved = {}
        return found

    def close(self) -> None:
        self._thread.shutdown()
        self._pair.generator.close()
