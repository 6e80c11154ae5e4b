"""``train.optimizer_offload``: DeepSpeed's optimizer in host memory moves the weights as the other one does.

DeepSpeed compiles it at its first use on a machine, for two minutes of a processor: these tests are slow ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import Config
from engine.generation.shared_weights import SharedWeights
from engine.machine.world import joined
from engine.training import models, zero
from tests.system import optimizer_offloading, shared
from tests.system.helpers import run_here, run_ranks, steps
from tests.system.test_runs import samples, short

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ON_HOST = "--train.zero_stage 2 --train.optimizer_offload cpu --train.schedule constant "


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_are_those_of_the_other_optimizer(tiny_model: str, tmp_path: Path, stage: int, dtype: str) -> None:
    with joined("cpu", 10) as world:
        one = optimizer_offloading.compare(tiny_model, stage, dtype, world)
        optimizer_offloading.resumed(one, tmp_path, tiny_model, stage, dtype, world)


def test_two_ranks(tiny_model: str, tmp_path: Path) -> None:
    run_ranks(2, optimizer_offloading.__file__, tiny_model, str(tmp_path), timeout=240)


@pytest.mark.usefixtures("without_pictures")
def test_a_run_resumes_token_for_token(tiny_model: str, tmp_path: Path) -> None:
    for name in ("whole", "parts"):
        run_here(short(tiny_model, tmp_path, name) + ON_HOST + f"--train.steps {4 if name == 'whole' else 2}")
    run_here(f"--resume {tmp_path / 'parts'} --train.steps 4")
    whole, parts = (samples(tmp_path / name) for name in ("whole", "parts"))
    assert len(steps(tmp_path / "parts")) == 4
    assert [row["response"] for row in parts] == [row["response"] for row in whole]
    said = run_here(f"--resume {tmp_path / 'parts'} --train.optimizer_offload none", ok=False)
    assert "train.optimizer_offload" in said.stderr


def test_the_sampler_can_use_the_weights_in_place(tmp_path: Path) -> None:
    """DeepSpeed's buffer on the device is laid out, and stays where it is, as without."""
    pytest.importorskip("vllm")
    shared.make_model("Qwen2", tied=False).save_pretrained(tmp_path)
    policy = models.load_policy(str(tmp_path), dtype=torch.bfloat16)
    train = {"zero_stage": 2, "optimizer_offload": "cpu"}
    config = Config.model_validate({"model": {"dtype": "bfloat16"}, "train": train})
    with joined("cpu", 5):
        engine = zero.build(policy, config, learning_rate=0.1, total_steps=2)
        assert SharedWeights(engine).fits() is None
        before = [parameter.data_ptr() for parameter in engine.module.parameters()]
        shared.step(engine, 1)
        assert [parameter.data_ptr() for parameter in engine.module.parameters()] == before
