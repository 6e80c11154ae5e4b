"""Optimizer states that go to the host and come back are the same, and are really gone in between."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.machine.world import World, joined
from engine.training import offload
from tests.system import gradients, offloading
from tests.system.helpers import run_ranks


@pytest.fixture(scope="module")
def world():
    with joined("cpu", 5) as alone:
        yield alone


@pytest.mark.parametrize(
    "stage, dtype, bytes_each",
    [(0, "float32", 8), (0, "bfloat16", 12), (1, "bfloat16", 12), (2, "bfloat16", 12), (3, "bfloat16", 14)],
)
def test_offload_and_reload_change_no_bit(
    tiny_model: str, world: World, monkeypatch: pytest.MonkeyPatch, stage: int, dtype: str, bytes_each: int
) -> None:
    """Two parameter groups, two models, two cycles; chunks much smaller than the states."""
    monkeypatch.setattr(offload, "CHUNK_BYTES", 1000)
    trainer = offloading.compare(tiny_model, stage, dtype, world)
    engines = trainer.engines.values()
    assert all(len(engine.optimizer.param_groups) == 2 for engine in engines)
    parameters = sum(getattr(p, "ds_numel", p.numel()) for engine in engines for p in engine.module.parameters())
    buckets = 2 * 100_000_000 if stage == 3 else 0
    before = offloading.everything(trainer)
    samples = gradients.batch()
    logprobs = trainer.logprobs(trainer.policy, samples)

    freed = trainer.offload()
    assert freed == pytest.approx(bytes_each * parameters + buckets, rel=1e-3)
    for engine in (trainer.policy, trainer.value):
        moments = [t for s in engine.basic_optimizer.state.values() for t in s.values() if t.ndim]
        assert moments and all(t.untyped_storage().nbytes() == 0 for t in moments)
    assert torch.equal(trainer.logprobs(trainer.policy, samples), logprobs), "the weights themselves stay"
    assert trainer.offload() == 0
    with pytest.raises(RuntimeError, match=r"call Trainer\.reload"):
        offloading.update(trainer, 0)
    # What comes back is what lies on the host, not a block of memory that happens to hold the old numbers still.
    for states in trainer._states:
        for chunk in states._hosts[-1]:
            chunk.zero_()
    trainer.reload()
    after = offloading.everything(trainer)
    changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if not torch.equal(a, b)]
    assert len(changed) == 2 and all(float(after[i].abs().max()) == 0.0 for i in changed)


@pytest.mark.slow
def test_two_ranks_offload_save_and_load(tiny_model: str, tmp_path: Path) -> None:
    """ZeRO-2 and 3 with uneven lengths; every rank saves, in time, and loads what it had."""
    run_ranks(2, offloading.__file__, tiny_model, str(tmp_path), timeout=90)
