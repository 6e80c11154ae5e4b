"""Training and generation on ranks of their own: the paper's schedule (Noukhovitch et al. 2024, arXiv 2410.18252).

The trainer is the one who decides. It sends the sampler one order at a time, each with new weights if there are any:
to draw the batch of a step, which it may as soon as the policy is at most ``schedule.staleness`` updates behind the one
that will be trained on that batch; to answer the held-out prompts; to stop. Orders are given between two updates, so
weights are always of one version, and no batch is ever thrown away.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from engine.config import Config
from engine.generation import equal_weights
from engine.generation.base import Generator, NamedTensors, Text
from engine.generation.equal_weights import HandOverError, LogprobProof, Receipt
from engine.launch import failures
from engine.machine.link import Link, Manifest
from engine.machine.world import World
from engine.memory.meter import Meter
from engine.memory.planning import MemoryPlan
from engine.memory.units import GIB
from engine.models import digest
from engine.rollouts.source import Batch, Source
from engine.sample import Sample
from engine.schedules.base import Schedule
from engine.training import weights
from engine.training.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Start:
    """What the generating ranks have to know before they build the sampler."""

    run_dir: str
    model: str


@dataclass(frozen=True, slots=True)
class Order:
    """What all generating ranks do next; each is answered once, by the first of them."""

    kind: Literal["batch", "held_out", "probe", "stop"]
    version: int
    """Of the weights to do it with."""
    manifest: Manifest = ()
    """Of the weights that follow the order; empty if the sampler has them."""
    texts: list[Text] = field(default_factory=list)
    """To be answered by their log-probabilities, which prove that the weights have arrived."""
    step: int = 0
    cursor: int = 0
    """For a batch: which, and where its prompts begin in the stream."""
    probe: list[list[int]] = field(default_factory=list)
    """For a probe: prompts to answer greedily."""
    tokens: int = 0


class SplitTraining(Schedule):
    """The training side.

    Args:
        trainer: with the same weights as the sampler begins with.
        plan, sampler_plan: of this side's memory, and of the other's.
        probe: token ids of prompts that hand-overs are proved with.
        tokens: greedy tokens to each of them.
        say: tells the person something.

    Raises:
        HandOverError: the sampler's greedy tokens change by a hand-over of the weights it has.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        trainer: Trainer,
        plan: MemoryPlan,
        sampler_plan: MemoryPlan,
        probe: list[list[int]],
        tokens: int,
        say: Callable[[str], None],
    ) -> None:
        self._world, self.trainer, self.plan, self._sampler_plan = world, trainer, plan, sampler_plan
        self._steps, self._staleness = config.train.steps, config.schedule.staleness
        self._per_prompt = config.eval.samples_per_prompt
        self._version = self._sampler_version = 0
        self._step = self._cursor = 0  # of the next batch to be ordered
        self._orders = 0
        self._outstanding: Literal["batch", "held_out", "probe", "stop"] | None = None
        self._drawn: dict[int, Batch] = {}
        self._last: dict[str, float] = {}  # of the last batch
        self._proof: LogprobProof | None = None
        self._expected: np.ndarray | None = None
        self._sent: dict[str, torch.Tensor] = {}  # digests of the weights that went with the last order
        self._unread: list[str] = []  # in the other side's samplers
        self._proved: dict[str, float] = {}
        answers = self._probed(probe, tokens)
        self._proof = LogprobProof(probe, answers, config.generation.max_logprob_gap)
        if self._unread:
            say(equal_weights.unread(self._unread))

    @property
    def _link(self) -> Link:
        assert self._world.link is not None, "only rank 0 speaks to the other side"
        return self._world.link

    def _probed(self, probe: list[list[int]], tokens: int) -> list[list[int]]:
        """The sampler's greedy tokens, which must be the same by its own weights and then by the trainer's."""
        answers: list[list[list[int]]] = []
        for weights_first in (False, True):
            self._order("probe", send=weights_first, probe=probe, tokens=tokens)
            answers.append(self._world.broadcast(self._answer() if self._world.main else None))
        if answers[0] != answers[1]:
            raise HandOverError(
                f"the sampler's greedy tokens changed over a hand-over of the same weights: {answers[0]} became "
                f"{answers[1]}: set generation.backend hf"
            )
        return answers[0]

    def sample(self, step: int) -> Batch:
        while True:
            if self._world.main:
                while self._outstanding and (step not in self._drawn or self._link.arrived(self._name)):
                    self._answer()
            # The sampler is idle: give it the next batch, if that may be drawn from this version already.
            allowed = self._world.broadcast(
                self._outstanding is None and self._step < self._steps and self._step - step <= self._staleness
            )
            if not allowed:
                break
            self._order("batch", step=self._step, cursor=self._cursor)
        whole = self._world.broadcast(self._drawn.pop(step) if self._world.main else None)
        busy = whole.seconds + whole.idle_seconds
        self._last = {
            "idle/generate": whole.idle_seconds / busy if busy else 0.0,
            "rollout/generate_seconds": whole.seconds,
        }
        if whole.peak_bytes:
            self._last["memory/generate_gib"] = whole.peak_bytes / GIB
            self._last |= self._sampler_plan.errors({"generate": whole.peak_bytes})
        share = len(whole.samples) // self._world.size
        whole.samples = whole.samples[self._world.rank * share : (self._world.rank + 1) * share]
        return whole

    def _order(self, kind: Literal["batch", "held_out", "probe", "stop"], send: bool = False, **details: Any) -> None:
        """Gives an order, and the weights if they are newer than the sampler's. Collective."""
        send = send or self._sampler_version != self._version
        self._orders += 1
        if self._world.main:
            manifest = weights.manifest(self.trainer.policy) if send else ()
            texts = self._proof.texts if self._proof and send else []
            self._link.send(f"order-{self._orders}", Order(kind, self._version, manifest, texts, **details))
            self._outstanding = kind
        if send:
            tensors = weights.full_weights(self.trainer.policy)
            if self._world.main:
                self._sent = {}
                self._link.send_tensors(self._digested(tensors))
            else:  # ZeRO-3 gathers on all ranks
                for _ in tensors:
                    pass
            self._sampler_version = self._version
            self._expected = self._logprobs(self._proof) if self._proof else None

    def _digested(self, tensors: NamedTensors) -> Iterator[torch.Tensor]:
        for name, tensor in tensors:
            self._sent[name] = digest.digest(tensor)
            yield tensor

    @property
    def _name(self) -> str:
        return f"answer-{self._orders}"

    def _answer(self) -> Any:
        """Waits for the answer to the last order, and keeps it if it is a batch; on rank 0."""
        answer, logprobs, receipts = self._link.receive(self._name)
        if receipts:
            self._check(receipts)
        if self._proof and self._expected is not None:
            for rank in logprobs or []:  # the metrics kept are the last generating rank's
                self._proved |= self._proof.check(self._expected, rank, self._sampler_version)
        if self._outstanding == "batch":
            self._drawn[answer.step] = answer
            self._step, self._cursor = answer.step + 1, answer.cursor
        self._outstanding = None
        return answer

    def _check(self, receipts: Sequence[Receipt]) -> None:
        """Raises HandOverError if what a generating rank received is not what was sent, or not what it then holds."""
        sent = dict(zip(self._sent, digest.read(list(self._sent.values())), strict=True))
        lost = [name for receipt in receipts for name in receipt.lost]
        lost += [name for receipt in receipts for name, value in receipt.sent.items() if sent[name] != value]
        if lost:
            raise equal_weights.lost(self._sampler_version, list(dict.fromkeys(lost)))
        self._proved, self._unread = dict(receipts[-1].metrics), receipts[-1].unread

    def hand_over(self, version: int) -> None:
        """The weights travel with the next order."""
        self._version = version

    def held_out(self) -> list[Sample]:
        self._settle()
        self._order("held_out")
        samples: list[Sample] = self._world.broadcast(self._answer() if self._world.main else None)
        prompts = len(samples) // self._per_prompt
        start, end = (prompts * rank // self._world.size for rank in (self._world.rank, self._world.rank + 1))
        return samples[start * self._per_prompt : end * self._per_prompt]

    def _settle(self) -> None:
        if self._world.main and self._outstanding:
            self._answer()

    def in_flight(self, wait: bool = True) -> list[Batch]:
        if wait:
            self._settle()
        return [self._drawn[step] for step in sorted(self._drawn)]

    def resume(self, batches: Sequence[Batch], step: int, cursor: int) -> None:
        self._drawn = {batch.step: batch for batch in batches}
        last = batches[-1] if batches else None
        self._step, self._cursor = (last.step + 1, last.cursor) if last else (step, cursor)

    def metrics(self, step_seconds: float, waited: float) -> dict[str, float]:
        metrics = self._proved | self._last | {"idle/train": waited / step_seconds}
        self._proved = {}
        return metrics

    def close(self) -> None:
        self._settle()
        self._order("stop")
        if self._world.main:
            self._answer()  # until then the other side needs the store


def generate(config: Config, world: World, build: Callable[[Config, World, str], tuple[Generator, Source]]) -> None:
    """The generating side: builds the sampler and follows orders until it is told to stop. Collective.

    Args:
        build: makes the sampler and its source from the model's folder.
    """
    assert world.link is not None
    start: Start = world.link.receive(f"start-{world.rank}")
    with _errors_left(Path(start.run_dir), world):
        generator, source = build(config, world, start.model)
        meter = Meter(world.device)
        finished, idle = time.perf_counter(), 0.0
        for number in itertools.count(1):
            order: Order = _receive(world, f"order-{number}")
            idle += time.perf_counter() - finished
            if order.manifest:
                generator.renew(world.link.receive_tensors(order.manifest), order.version)
            receipts = world.gather(generator.receipt) if order.manifest else None
            logprobs = world.gather(generator.logprobs(order.texts)) if order.texts else None
            answer: Any = None
            if order.kind == "batch":
                meter.start()
                answer = source.batch(generator, order.step, order.cursor)
                meter.stop("generate")
                answer.idle_seconds, answer.peak_bytes = idle, int(world.max(meter.phases.get("generate", 0)))
                answer.samples = _gathered(world, answer.samples)
                idle = 0.0
            elif order.kind == "held_out":
                answer = _gathered(world, source.held_out(generator))
            elif order.kind == "probe":
                answer = generator.greedy(order.probe, order.tokens)
            finished = time.perf_counter()
            if world.rank == 0:
                world.link.send(f"answer-{number}", (answer, logprobs, receipts))
            if order.kind == "stop":
                break
        generator.close()


def _receive(world: World, name: str) -> Any:
    """The first generating rank's message, on all of them."""
    assert world.link is not None
    return world.broadcast(world.link.receive(name) if world.rank == 0 else None)


def _gathered(world: World, samples: list[Sample]) -> list[Sample]:
    return [sample for share in world.gather(samples) for sample in share]


@contextmanager
def _errors_left(run_dir: Path, world: World) -> Iterator[None]:
    """Leaves this rank's error for rank 0 of the training side, which reports it."""
    try:
        yield
    except Exception as error:
        failures.leave(run_dir, world.process, error)
        raise
