"""Sampler and trainer on one set of devices: built in the order, and taking turns, as the memory plan says.

    sample -> rest, take_back -> train -> make_room, hand_over -> sample

Before the first step the whole turn is proved: the sampler sleeps, takes the weights it had, and must give the same
greedy tokens as before. After every hand-over what lies in the sampler is compared with what was sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from engine.generation import equal_weights
from engine.generation.base import Generator
from engine.generation.equal_weights import HandOverError
from engine.machine.world import World
from engine.rollouts.source import Batch, Source
from engine.sample import Sample
from engine.schedules.base import Schedule
from engine.training import weights
from engine.training.trainer import Trainer

if TYPE_CHECKING:
    from engine.generation.shared_weights import SharedWeights
    from engine.memory.planning import MemoryPlan

    BuildGenerator = Callable[[MemoryPlan, SharedWeights | None], Generator]


class Colocation(Schedule):
    """Sampler and trainer in turns: every batch is drawn from the newest weights.

    Args:
        plan: who makes room for whom.
        copying_plan: makes the plan for weights that cannot be shared though ``plan`` says so.
        prompts: token ids that the turn is proved with.
        tokens: greedy tokens to each of them.
        source: what is sampled.
        build_generator: makes the sampler, with the policy's first weights; or with those it is to share.
        build_trainer: makes the trainer, with the same weights.
        say: tells the person something.

    Raises:
        HandOverError: the proof fails.
    """

    phase = "generate"

    def __init__(
        self,
        world: World,
        plan: MemoryPlan,
        copying_plan: Callable[[], MemoryPlan],
        prompts: Sequence[list[int]],
        *,
        tokens: int,
        source: Source,
        build_generator: BuildGenerator,
        build_trainer: Callable[[], Trainer],
        say: Callable[[str], None],
    ) -> None:
        self.plan, self._world, self._say, self._build_generator = plan, world, say, build_generator
        self._source, self._cursor = source, 0
        self._prompts, self._tokens = prompts, tokens
        self.answers: list[list[int]] = []  # the first policy's greedy tokens to the prompts
        if plan.zero_copy:
            self.trainer = build_trainer()
            shared = self._shared_weights(copying_plan)
            self.make_room()
            self.generator = build_generator(self.plan, shared)
            before = self._greedy()
        else:  # the sampler makes room for the trainer's construction too
            self.generator = build_generator(plan, None)
            before = self._greedy()
            self.generator.sleep()
            self.trainer = build_trainer()
        self._prove(before)
        if self.generator.unread:
            say(equal_weights.unread(self.generator.unread))

    def _shared_weights(self, copying_plan: Callable[[], MemoryPlan]) -> SharedWeights | None:
        from engine.generation.shared_weights import SharedWeights

        shared = SharedWeights(self.trainer.policy)
        if reason := shared.fits():
            self.plan = copying_plan()
            if self.plan.checkpointing:
                self.trainer.recompute_activations()
            self._say(f"Trainer and sampler hold a copy of the weights each: {reason}\n{self.plan.table()}")
            return None
        return shared

    def sample(self, step: int) -> Batch:
        batch = self._source.batch(self.generator, step, self._cursor)
        self._cursor = batch.cursor
        return batch

    def rest(self) -> None:
        self.generator.sleep()

    def take_back(self) -> None:
        if self.plan.offload:
            self.trainer.reload()

    def make_room(self) -> None:
        if self.plan.offload:
            self.trainer.offload()

    def hand_over(self, version: int) -> None:
        """The sampler gets its memory, and the trainer's weights after ``version`` updates; then it is ready.

        Raises:
            HandOverError: on all ranks, if the sampler of any does not hold what it was sent.
        """
        if lost := self._renew(version):
            raise equal_weights.lost(version, lost)

    def held_out(self) -> list[Sample]:
        return self._source.held_out(self.generator)

    def resume(self, batches: Sequence[Batch], step: int, cursor: int) -> None:
        self._cursor = cursor

    def metrics(self, step_seconds: float, waited: float) -> dict[str, float]:
        """Of the last hand-over."""
        return self.generator.receipt.metrics if self.generator.receipt else {}

    def close(self) -> None:
        self.generator.close()

    def _renew(self, version: int) -> list[str]:
        """The hand-over; gives the tensors that any rank's sampler lost. Collective."""
        self.generator.renew(weights.full_weights(self.trainer.policy), version)
        lost = self.generator.receipt.lost if self.generator.receipt else []
        if not self._world.max(bool(lost)):
            return []
        return list(dict.fromkeys(name for rank in self._world.gather(lost) for name in rank))

    def _greedy(self) -> list[list[int]]:
        return self.generator.greedy(self._prompts, self._tokens)

    def _prove(self, before: list[list[int]]) -> None:
        self.make_room()
        lost = self._renew(0)
        if lost and self.plan.sleep != "level2":
            raise equal_weights.lost(0, lost)
        self.answers = after = self._greedy()
        if not self._world.max(after != before) and not lost:
            return
        changed = [f"{old} became {new}" for old, new in zip(before, after, strict=True) if old != new]
        where = changed[0] if changed else f"lost: {', '.join(lost[:4])}" if lost else "on another rank"
        if self.plan.sleep != "level2":
            raise HandOverError(
                f"the sampler's greedy tokens changed over a sleep ({self.plan.sleep}) and a hand-over of the same "
                f"weights: {where}: set {'memory.zero_copy off' if self.plan.zero_copy else 'generation.backend hf'}"
            )
        self._say(
            "The sampler's greedy tokens changed over a sleep of level 2 and a hand-over of the same weights: vLLM "
            f"loses something of this model. It sleeps at level 1 instead, its weights in host memory ({where})"
        )
        self.plan = dataclasses.replace(self.plan, sleep="level1")
        self.generator.close()
        self.generator = self._build_generator(self.plan, None)
        self._prove(before)
