"""A hand-over that loses one tensor's update at a learning rate of 1e-6 ends the run and names the tensor."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

import engine.run
from engine.generation.equal_weights import HandOverError
from tests import users
from tests.system import losing
from tests.system.helpers import rank_outputs, run_ranks, steps

pytestmark = pytest.mark.usefixtures("without_pictures")

VICTIM = "model.layers.1.self_attn.k_proj.weight"
SMALL = ("--train.learning_rate", "1e-6")
NAMED = rf"hand-over of policy version 1 the sampler does not hold .* 1 tensor\(s\): {re.escape(VICTIM)}: "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return users.model_folder(tmp_path_factory.mktemp("model"))


def test_whole_runs_compare_every_tensor_and_say_so(model: Path, tmp_path: Path) -> None:
    """Also in bf16, with the tied head's embedding once."""
    tied = users.model_folder(tmp_path / "tied", tie_word_embeddings=True)
    assert engine.run.main(users.arguments(tmp_path, tied, *SMALL, "--model.dtype", "bfloat16")) == 0
    rows = steps(tmp_path / "runs" / "run")
    assert [row["weights/digest_tensors"] for row in rows] == [20, 20]  # 9 a layer, embedding, norm
    assert all(row["weights/unread_tensors"] == 0 <= row["time/digest"] for row in rows)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), id="hf"),
        pytest.param(("--schedule.staleness", "1"), id="ahead"),
        pytest.param(("--lora.rank", "4"), id="lora"),
        pytest.param(("--algo", "online_dpo", "--rollout.samples_per_prompt", "2"), id="online_dpo"),
    ],
)
def test_hf_runs_name_the_lost_tensor(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    losing.hf(monkeypatch, VICTIM)
    with pytest.raises(HandOverError, match=NAMED):
        engine.run.main(users.arguments(tmp_path, model, *SMALL, "--train.steps", "3", *more))


@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="needs vLLM")
@pytest.mark.slow
def test_vllm_runs_name_the_lost_tensor(tmp_path: Path) -> None:
    """On the CPU, where q, k and v are one matrix and only a repacked copy of it is left; in a process of its own."""
    shape = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    model = users.model_folder(tmp_path / "model", **shape, tie_word_embeddings=True)
    more = ("--generation.backend", "vllm", "--memory.kv_cache_gib", "0.1", "--launch.ranks", "1")
    arguments = users.arguments(tmp_path, model, *SMALL, *more)
    output = run_ranks(1, losing.__file__, "vllm", VICTIM, *arguments, timeout=240)
    assert re.search(NAMED, output), output


def test_a_tensor_that_the_first_hand_over_changes_is_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = losing.HFGenerator._load_weights

    def halved(self: Any, weights: Any) -> None:
        load(self, ((name, tensor / 2 if name == VICTIM else tensor) for name, tensor in weights))

    monkeypatch.setattr(losing.HFGenerator, "_load_weights", halved)
    with pytest.raises(HandOverError, match=r"policy version 0 .*" + re.escape(VICTIM)):
        engine.run.main(users.arguments(tmp_path, model))


@pytest.mark.parametrize(
    "where", ["split", *(pytest.param(one, marks=pytest.mark.slow) for one in ("zero3", "zero3 lora"))]
)
@pytest.mark.slow
def test_two_ranks_name_the_lost_tensor(model: Path, tmp_path: Path, where: str) -> None:
    """One of two samplers loses it: every training rank ends with the error, and the generating one does not wait."""
    more = {
        "split": ["--schedule.placement", "split"],
        "zero3": ["--train.zero_stage", "3"],
        "zero3 lora": ["--train.zero_stage", "3", "--lora.rank", "4"],
    }[where]
    arguments = users.arguments(tmp_path, model, *SMALL, "--launch.ranks", "2", *more)
    first, second = rank_outputs(2, losing.__file__, "hf", VICTIM, *arguments, timeout=120)
    assert re.search(NAMED, first), first
    assert ("ended with 1" in second) if where == "split" else re.search(NAMED, second), second
