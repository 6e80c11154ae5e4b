"""Sampler and trainer take turns in two processes: proof, hand-over, agreement after large steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system import colocated
from tests.system.helpers import run_engine, run_ranks, steps
from tests.system.test_runs import short


@pytest.mark.slow
def test_two_ranks_take_turns(tiny_model: str) -> None:
    """ZeRO-3 with one engine of two ranks, ZeRO-2 with an engine each; offloaded states, uneven work and speed."""
    pytest.importorskip("vllm")
    left = [Path(f"/dev/shm/-tp:0-[0-1]-cpushm_{part}") for part in range(2)]  # as vLLM names it, by a killed run
    for path in left:
        path.touch()
    try:
        run_ranks(2, colocated.__file__, tiny_model, timeout=150)
    finally:
        for path in left:
            path.unlink()


@pytest.mark.slow
def test_offloaded_states_change_no_step_no_checkpoint_and_no_resumed_run(tiny_model: str, tmp_path: Path) -> None:
    plain, moved = (
        short(tiny_model, tmp_path, name) + "--algo ppo --train.schedule constant " for name in ("plain", "moved")
    )
    run_engine(plain)
    run_engine(f"{moved} --memory.offload on --save.every_steps 1 --train.steps 2")
    run_engine(f"--resume {tmp_path}/moved --train.steps 3")
    for a, b in zip(steps(tmp_path / "plain"), steps(tmp_path / "moved"), strict=True):
        varies = ("time", "memory", "tokens_per_second")
        assert {k: v for k, v in a.items() if not k.startswith(varies)} == {
            k: v for k, v in b.items() if not k.startswith(varies)
        }
        assert "time/offload" in b and "time/offload" not in a and "time/sleep" in a
