"""Generation one batch ahead of training, on the same devices at the same time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from engine.generation.equal_weights import LogprobProof
from engine.rollouts.source import Batch
from engine.sample import Sample
from engine.schedules.base import Schedule
from engine.schedules.colocation import Colocation


class Overlapping(Schedule):
    """On the same devices at the same time: a thread draws the next batch while this one is trained on.

    The sampler takes new weights between two batches, when the trainer is between two updates: each batch, but the
    first, is drawn from weights of one update before those it is trained on.

    Args:
        colocation: has built and proved both; draws batches and hands the weights over when told to.
        proof: compares log-probabilities after each hand-over: samples, being older, prove nothing.
        steps: batches to draw in the whole run.
    """

    def __init__(self, colocation: Colocation, proof: LogprobProof, steps: int) -> None:
        self._colocation, self._proof, self._steps = colocation, proof, steps
        self._proved: dict[str, float] = {}
        self.trainer, self.plan = colocation.trainer, colocation.plan
        self._generator = colocation.generator
        self._version = self._generator.version
        self._next: Future[Batch] | None = None
        self._finished = time.perf_counter()
        self._idle_share = 0.0
        device = next(self.trainer.policy.module.parameters()).device
        gpu = device if device.type == "cuda" else None
        # On a stream of its own, before the trainer's: a token takes many short kernels, which would each wait for all
        # that the trainer has queued.
        self._stream = torch.cuda.Stream(gpu, priority=-1) if gpu else None
        use_gpu = (lambda: torch.cuda.set_device(gpu)) if gpu else None
        self._thread = ThreadPoolExecutor(1, "tandem-sampler", use_gpu)

    def sample(self, step: int) -> Batch:
        if self._next is None:  # the run's first batch, or a resumed one's with nothing in flight
            self._renew()
        batch = self._next.result() if self._next else self._draw(step)
        self._next = None
        self._renew()
        if step + 1 < self._steps:
            if self._stream:
                self._stream.wait_stream(torch.cuda.current_stream())
            self._next = self._thread.submit(self._draw, step + 1)
        busy = batch.seconds + batch.idle_seconds
        self._idle_share = batch.idle_seconds / busy if busy else 0.0
        return batch

    def _draw(self, step: int) -> Batch:
        idle = time.perf_counter() - self._finished
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            batch = self._colocation.sample(step)
            if self._stream:
                self._stream.synchronize()
        batch.idle_seconds, self._finished = idle, time.perf_counter()
        return batch

    def _renew(self) -> None:
        if self._generator.version != self._version:
            self._colocation.hand_over(self._version)
            trainers, samplers = self._logprobs(self._proof), self._generator.logprobs(self._proof.texts)
            self._proved = self._proof.check(trainers, samplers, self._version)
            if self._generator.receipt:
                self._proved |= self._generator.receipt.metrics

    def hand_over(self, version: int) -> None:
        self._version = version

    def held_out(self) -> list[Sample]:
        self.in_flight()
        self._renew()
        samples = self._colocation.held_out()
        self._finished = time.perf_counter()
        return samples

    def in_flight(self, wait: bool = True) -> list[Batch]:
        return [self._next.result()] if self._next else []

    def resume(self, batches: Sequence[Batch], step: int, cursor: int) -> None:
        if batches:
            self._next = Future()
            self._next.set_result(batches[0])
            cursor = batches[0].cursor  # the batch after it is drawn from there on
        self._colocation.resume([], step, cursor)

    def metrics(self, step_seconds: float, waited: float) -> dict[str, float]:
        metrics = self._proved | {"idle/generate": self._idle_share, "idle/train": waited / step_seconds}
        self._proved = {}
        return metrics

    def close(self) -> None:
        self._thread.shutdown()
        self._colocation.close()
