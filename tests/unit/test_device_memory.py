"""What is made of the numbers that driver and allocator give."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from engine.memory.meter import MemoryGrowthError, Meter, use_growing_segments
from engine.memory.planning import MemoryPlan, Phase
from engine.memory.units import GIB

WORLD = SimpleNamespace(max=float)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A card of 80 GiB: in use (by the driver), held (by PyTorch), and the most it has held; in GiB."""
    card = SimpleNamespace(used=0.0, held=0.0, most=0.0, resets=0)

    def reset(device: torch.device) -> None:
        card.resets += 1

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int((80 - card.used) * GIB), 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: int(card.held * GIB))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: int(card.most * GIB))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    return card


def plan(sleep: str) -> MemoryPlan:
    phases = {"generate": Phase({"a": 40 * GIB}), "train": Phase({"a": 50 * GIB})}
    return MemoryPlan(sleep, False, False, GIB, phases)  # type: ignore[arg-type]


def test_peak_leaves_out_what_sleeps(gpu: SimpleNamespace) -> None:
    """PyTorch counts 10 GiB of vLLM's that sleep; 2 GiB of CUDA's it does not know."""
    meter = Meter(torch.device("cuda"))
    meter.start()
    gpu.used, gpu.held, gpu.most = 22.0, 30.0, 60.0
    meter.stop("train")
    gpu.used, gpu.held, gpu.most = 42.0, 40.0, 42.0
    meter.stop("generate")
    gpu.used = 12.0
    meter.asleep()
    found = meter.metrics(plan("level2"), WORLD)
    assert gpu.resets == 1
    assert found["memory/train_gib"] == pytest.approx(52) and found["memory/generate_gib"] == pytest.approx(44)
    assert found["memory/plan_error_train"] == pytest.approx(0.04)
    assert found["memory/plan_error_generate"] == pytest.approx(0.1)
    assert found["memory/peak_gib"] == pytest.approx(52) and found["memory/asleep_gib"] == pytest.approx(12)


def test_without_sleep_there_is_one_peak(gpu: SimpleNamespace) -> None:
    meter = Meter(torch.device("cuda"))
    for gpu.used, name in ((55.0, "generate"), (51.0, "train")):
        meter.stop(name)
    found = meter.metrics(plan("none"), WORLD)
    assert found["memory/plan_error_train"] == pytest.approx(0.1)
    assert "memory/plan_error_generate" not in found and "memory/asleep_growth" not in found


@pytest.mark.parametrize("phase", ["train", "generate"])
def test_a_plan_of_one_phase_is_compared_with_that_phase(gpu: SimpleNamespace, phase: str) -> None:
    meter = Meter(torch.device("cuda"))
    gpu.used = 55.0
    meter.stop(phase)
    found = meter.metrics(MemoryPlan("none", False, False, GIB, {phase: Phase({"a": 50 * GIB})}), WORLD)
    assert found == pytest.approx(
        {f"memory/{phase}_gib": 55.0, "memory/peak_gib": 55.0, f"memory/plan_error_{phase}": 0.1}
    )


def test_memory_asleep_may_grow_by_5_percent_since_the_second_step(gpu: SimpleNamespace) -> None:
    meter = Meter(torch.device("cuda"))
    for gpu.used in (10.0, 20.0, 20.9, 19.0):
        meter.asleep()
    assert meter.metrics(plan("kv"), WORLD)["memory/asleep_growth"] == pytest.approx(-0.05)
    gpu.used = 21.1
    with pytest.raises(MemoryGrowthError, match=r"21\.10 GiB .* 20\.00 GiB"):
        meter.asleep()


def test_a_process_on_the_cpu_has_a_peak_and_no_phases() -> None:
    meter = Meter(torch.device("cpu"))
    meter.start()
    meter.stop("train")
    meter.asleep()
    found = meter.metrics(MemoryPlan("none", False, False, 1), WORLD)
    assert found.keys() == {"memory/peak_gib"} and found["memory/peak_gib"] > 0.01


@pytest.mark.parametrize(
    "chosen, expected",
    [
        ({}, ["expandable_segments:True"]),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, ["max_split_size_mb:128,expandable_segments:True"]),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:128"}, ["max_split_size_mb:128,expandable_segments:True"]),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, []),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False", "PYTORCH_ALLOC_CONF": "max_split_size_mb:128"}, []),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, []),
    ],
)
def test_the_allocator_keeps_what_a_person_chose(
    chosen: dict[str, str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in chosen.items():
        monkeypatch.setenv(variable, value)
    given: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", given.append)
    use_growing_segments()
    assert given == expected
