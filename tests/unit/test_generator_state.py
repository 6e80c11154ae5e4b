"""The sampler's life cycle: a call in the wrong state raises, naming the call and the state."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import ClassVar

import pytest

from engine.generation import vllm_patches
from engine.generation.base import Generator, Response, WrongStateError
from engine.generation.sampling import Request, Sampling, sample_seed


class Recorder(Generator):
    """Records which hooks ran."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def _generate(self, requests, sampling):
        self.ran.append("generate")
        return [Response([2], [0.0], "stop") for _ in requests]

    def _logprobs(self, texts):
        self.ran.append("logprobs")
        return []

    def _load_weights(self, weights) -> None:
        self.ran.append("load")

    def _sleep(self) -> None:
        self.ran.append("sleep")

    def _wake(self) -> None:
        self.ran.append("wake")

    def _start(self) -> None:
        self.ran.append("start")


CALLS = {
    "generate": lambda g: g.generate([Request([1], 0)], Sampling(1, 1.0, ())),
    "logprobs": lambda g: g.logprobs([]),
    "sleep": lambda g: g.sleep(),
    "wake": lambda g: g.wake(),
    "load_weights": lambda g: g.load_weights([], 1),
    "start": lambda g: g.start(),
}
ALLOWED = {"ready": {"generate", "logprobs", "sleep"}, "asleep": {"wake"}, "weights": {"load_weights"}}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("state", ALLOWED)
def test_wrong_state_raises_and_does_nothing(state: str, call: str) -> None:
    generator = Recorder()
    for step in {"ready": [], "asleep": ["sleep"], "weights": ["sleep", "wake"]}[state]:
        CALLS[step](generator)
    before = list(generator.ran)
    if call in ALLOWED[state]:
        CALLS[call](generator)
        assert generator.ran[len(before) :] == [call.removesuffix("_weights")]
    else:
        with pytest.raises(WrongStateError, match=call):
            CALLS[call](generator)
        assert generator.ran == before


def test_cannot_start_without_weights() -> None:
    generator = Recorder()
    generator.sleep()
    generator.wake()
    with pytest.raises(WrongStateError, match="without its weights"):
        generator.start()
    generator.load_weights([], 7)
    generator.start()
    assert (generator.state, generator.version) == ("ready", 7)


@pytest.mark.parametrize("asleep", [False, True])
def test_renewal_is_the_whole_cycle(asleep: bool) -> None:
    generator = Recorder()
    if asleep:
        generator.sleep()
    generator.renew([], 3)
    assert generator.ran == ["sleep", "wake", "load", "start"]
    assert (generator.state, generator.version) == ("ready", 3)


def test_a_failed_load_cannot_be_started() -> None:
    generator = Recorder()
    generator.sleep()
    generator.wake()
    generator.load_weights([], 1)
    generator._load_weights = lambda weights: 1 / 0  # type: ignore[assignment,return-value]
    with pytest.raises(ZeroDivisionError):
        generator.load_weights([], 2)
    with pytest.raises(WrongStateError):
        generator.start()


def test_sample_seeds_differ_by_run_step_and_sample() -> None:
    seeds = {sample_seed(seed, step, i) for seed in range(3) for step in range(4) for i in range(50)}
    assert len(seeds) == 600 and all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(1, 2, 3) == sample_seed(1, 2, 3)


class Allocator:
    """vLLM's, with 300 bytes of weights awake, and 500 and 200 bytes of KV cache asleep."""

    pieces: ClassVar = ((300, "weights", False), (500, "kv_cache", True), (200, "kv_cache", True))
    pointer_to_data: ClassVar = {
        place: SimpleNamespace(handle=(0, size, place, 0), tag=tag, is_asleep=asleep)
        for place, (size, tag, asleep) in enumerate(pieces)
    }

    @classmethod
    def get_instance(cls) -> type[Allocator]:
        return cls


@pytest.mark.parametrize("free", [699, 700])
def test_waking_up_without_room_takes_nothing_and_says_the_bytes(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", SimpleNamespace(CuMemAllocator=Allocator))
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (free, 1000))
    woken: list[str] = []
    llm = SimpleNamespace(wake_up=lambda tags: woken.extend(tags))
    if free < 700:
        with pytest.raises(RuntimeError, match="kv cache needs 700 bytes, 699 are free"):
            vllm_patches.wake_up(llm, "kv_cache")
        assert not woken
    else:
        vllm_patches.wake_up(llm, "kv_cache")
        assert woken == ["kv_cache"]


@pytest.mark.parametrize("stay, pools", [(True, ["kv_cache"]), (False, ["weights", "kv_cache"])])
def test_weights_that_stay_awake_are_kept_out_of_the_sleeping_pool(
    monkeypatch: pytest.MonkeyPatch, stay: bool, pools: list[str]
) -> None:
    used: list[str] = []

    class Worker:
        def _maybe_get_memory_pool_context(self, tag: str) -> nullcontext:
            used.append(tag)
            return nullcontext()

    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_worker", SimpleNamespace(Worker=Worker))
    monkeypatch.setattr(vllm_patches, "on_cpu", lambda: False)
    with vllm_patches.weights_stay_awake(stay):
        for tag in ("weights", "kv_cache"):
            with Worker()._maybe_get_memory_pool_context(tag):
                pass
    assert used == pools
    Worker()._maybe_get_memory_pool_context("weights")
    assert used[-1] == "weights", "other engines are as ever"
