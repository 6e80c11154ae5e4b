"""fp16 on a GPU: what the head's gradients lose, and what DeepSpeed makes of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.machine.world import World, joined
from tests import users
from tests.system import fp16

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with joined("cuda", 5) as alone:
        yield alone


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(users.model_folder(tmp_path_factory.mktemp("model")))


def test_the_head_of_a_large_vocabulary_loses_no_gradient() -> None:
    """Scaled after they were rounded, a quarter of dW and a twenty-fifth of dX were 0."""
    fp16.check_head("cuda", 8192, 896, 151_936, 1.0)


@pytest.mark.parametrize("algo,stage", [("rloo", 0), ("rloo", 2), ("rloo", 3), ("online_dpo", 2), ("ppo", 0)])
def test_small_gradients_arrive_whole(model: str, world: World, algo: str, stage: int) -> None:
    fp16.check_small_gradients(model, algo, stage, world)


@pytest.mark.parametrize("stage", [0, 2])
def test_an_overflow_skips_the_step(model: str, world: World, stage: int) -> None:
    fp16.check_overflow(model, stage, world)
