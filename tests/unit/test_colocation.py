"""Whose turn it is: the order of building and of taking turns, and the proof before the first step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.generation.base import Generator, Response
from engine.generation.equal_weights import HandOverError
from engine.memory.planning import MemoryPlan
from engine.schedules.colocation import Colocation
from engine.start import build

WORLD = SimpleNamespace(max=float)


class Sampler(Generator):
    """Writes down what happens to it; its greedy token is the last weight it was given."""

    def __init__(self, log: list[str], loses: bool) -> None:
        super().__init__()
        self.log, self.loses, self.token = log, loses, 7
        log.append("sampler")

    def _generate(self, requests, sampling):
        return [Response([self.token] * sampling.max_tokens, [0.0], "length") for _ in requests]

    def _logprobs(self, texts):
        raise NotImplementedError("a turn is proved by its samples")

    def _sleep(self) -> None:
        self.log.append("sleep")

    def _wake(self) -> None:
        self.log.append("wake")

    def _load_weights(self, weights) -> None:
        self.token = next(value for _, value in weights) + self.loses

    def _start(self) -> None:
        self.log.append("start")

    def close(self) -> None:
        self.log.append("close")


def colocation(log: list[str], weight: int = 7, loses: tuple[str, ...] = (), **plan) -> Colocation:
    def trainer():
        log.append("trainer")
        module = SimpleNamespace(
            named_parameters=lambda: [("model.w", SimpleNamespace(detach=lambda: weight))],
        )
        return SimpleNamespace(
            policy=SimpleNamespace(module=module),
            recompute_activations=lambda: log.append("recompute"),
            offload=lambda: log.append("offload"),
            reload=lambda: log.append("reload"),
        )

    settings = {"sleep": "none", "offload": False, "zero_copy": False, "kv_cache_bytes": 1} | plan
    return Colocation(
        WORLD,
        MemoryPlan(**settings),
        lambda: MemoryPlan("level2", True, False, 1, checkpointing=True),
        [[1, 2], [3]],
        tokens=4,
        source=None,
        build_generator=lambda plan, shared: Sampler(log, plan.sleep in loses),
        build_trainer=trainer,
        say=log.append,
    )


def test_sampler_sleeps_while_the_trainer_is_built() -> None:
    log: list[str] = []
    turns = colocation(log, sleep="level2")
    assert log == ["sampler", "sleep", "trainer", "wake", "start"]
    assert turns.generator.state == "ready" and turns.plan.sleep == "level2"


def test_states_leave_before_the_sampler_wakes_and_return_after_it_sleeps() -> None:
    log: list[str] = []
    turns = colocation(log, sleep="level2", offload=True)
    log.append("|")
    turns.rest()
    turns.take_back()
    turns.make_room()
    turns.hand_over(3)
    assert log == [
        *["sampler", "sleep", "trainer", "offload", "wake", "start", "|"],
        *["sleep", "reload", "offload", "wake", "start"],
    ]
    assert turns.generator.version == 3


def test_a_hand_over_that_changes_the_tokens_fails() -> None:
    with pytest.raises(HandOverError, match=r"\[7, 7, 7, 7\] became \[8, 8, 8, 8\]"):
        colocation([], weight=8, sleep="kv")


def test_level_2_that_loses_something_gives_way_to_level_1_and_says_so() -> None:
    log: list[str] = []
    turns = colocation(log, loses=("level2",), sleep="level2")
    (message,) = [line for line in log if "level 1 instead" in line]
    assert log[log.index(message) + 1 :] == ["close", "sampler", "sleep", "wake", "start"]
    assert turns.plan.sleep == "level1" and turns.generator.state == "ready"
    with pytest.raises(HandOverError, match="level1"):
        colocation([], loses=("level1", "level2"), sleep="level2")


@pytest.mark.parametrize("reason", [None, "the parts do not lie end to end"])
def test_trainer_first_where_weights_are_shared(monkeypatch: pytest.MonkeyPatch, reason: str | None) -> None:
    from engine.generation import shared_weights

    monkeypatch.setattr(shared_weights, "SharedWeights", lambda policy: SimpleNamespace(fits=lambda: reason))
    log: list[str] = []
    turns = colocation(log, zero_copy=True, sleep="kv")
    if reason is None:
        assert log == ["trainer", "sampler", "sleep", "wake", "start"] and turns.plan.zero_copy
    else:
        assert reason in log.pop(2)
        assert log == ["trainer", "recompute", "offload", "sampler", "offload", "sleep", "wake", "start"]
        assert (turns.plan.sleep, turns.plan.zero_copy) == ("level2", False)


@pytest.mark.parametrize("device, told", [("cuda", ["Starting", "Started in 0 s"]), ("cpu", [])])
def test_what_takes_long_on_a_gpu_is_announced(device: str, told: list[str]) -> None:
    said: list[str] = []
    world: Any = SimpleNamespace(device=SimpleNamespace(type=device))
    with build._announced("Starting", "Started", world, said.append):
        assert said == told[:1]
    assert said == told
