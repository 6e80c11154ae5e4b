"""fp16's loss scale: in the rows' weights before the head's gradients are rounded, and what comes of an overflow.

DeepSpeed's part runs on processors with fp16 instructions; tests/gpu/test_fp16_gradients.py does the same on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.machine.world import World, joined
from tests import users
from tests.system import fp16

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="DeepSpeed computes on the GPU here")
needs_fp16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_fp16_supported(), reason="DeepSpeed has no fp16 on this processor"
)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with joined("cpu", 5) as alone:
        yield alone


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(users.model_folder(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_the_head_loses_no_gradient(backend: str) -> None:
    fp16.check_head("cpu", 128, 64, 1000, 1e-3, backend)


@needs_fp16
@pytest.mark.parametrize(
    "algo,stage",
    [("rloo", 0), ("rloo", 1), ("rloo", 3), ("online_dpo", 2), ("ppo", 0), ("ppo", 2)],
)
def test_small_gradients_arrive_whole(model: str, world: World, algo: str, stage: int) -> None:
    fp16.check_small_gradients(model, algo, stage, world)


@needs_fp16
@pytest.mark.parametrize("stage", [0, 2])
def test_an_overflow_skips_the_step(model: str, world: World, stage: int) -> None:
    fp16.check_overflow(model, stage, world)
