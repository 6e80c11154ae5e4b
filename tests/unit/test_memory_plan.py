"""The memory plan: counts, bytes and decisions that can be checked by hand, and errors that say what to change."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from engine import run
from engine.config import Config, ConfigError
from engine.machine.world import World
from engine.memory import model_shape, planning
from engine.memory.planning import MemoryPlan, Phase
from engine.memory.units import GIB
from engine.start import build

ROOT = Path(__file__).resolve().parents[2]
QWEN2_1B5 = {
    "model_type": "qwen2", "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
N = 1_543_714_304
"""Parameters of that shape."""
H100 = int(79.1 * GIB)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("qwen")
    (folder / "config.json").write_text(json.dumps(QWEN2_1B5))
    return str(folder)


@pytest.fixture(autouse=True)
def plain_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)


def configured(path: str, **changes: Any) -> Config:
    """PPO, 256 episodes of up to 1024 tokens a step, vLLM, ZeRO-2 in bfloat16; ``section__key=value`` changes it."""
    tree: dict[str, Any] = {
        "algo": "ppo",
        "data": {"path": "prompts.jsonl"},
        "reward": {"function": "math:sqrt"},
        "model": {"path": path, "dtype": "bfloat16"},
        "generation": {"backend": "vllm"},
        "rollout": {"max_prompt_tokens": 512, "max_response_tokens": 512},
        "train": {"zero_stage": 2},
    }
    for key, value in changes.items():
        section, _, leaf = key.partition("__")
        if leaf:
            tree.setdefault(section, {})[leaf] = value
        else:
            tree[key] = value
    return Config.model_validate(tree)


# -- counts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["tied", "tied but stored", "own"])
def test_parameters_are_counted_in_the_headers(tmp_path: Path, head: str) -> None:
    config = {
        "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 12, "vocab_size": 10, "tie_word_embeddings": head != "own",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    embedding = np.zeros((10, 8), np.float16)
    save_file({"model.embed_tokens.weight": embedding, "odd": np.zeros((3, 5), np.float32)}, tmp_path / "a.safetensors")
    rest = {"model.norm.weight": np.zeros(8, np.float32)}
    save_file(rest if head == "tied" else rest | {"lm_head.weight": embedding}, tmp_path / "b.safetensors")
    shape = model_shape.read("model.path", str(tmp_path))
    assert shape.tied == (head != "own")
    assert shape.policy == 80 + 15 + 8 + (80 if head == "own" else 0)
    assert shape.value == 80 + 15 + 8 + 8
    assert (shape.kv_heads, shape.head_dim) == (2, 4)


def test_parameters_without_files_follow_from_the_configuration(qwen: str) -> None:
    assert model_shape.read("model.path", qwen).policy == N


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no model folder"):
        model_shape.read("model.path", str(tmp_path))
    (tmp_path / "config.json").write_text('{"n_embd": 8}')
    with pytest.raises(ConfigError, match=r"model\.path: .* has no num_attention_heads"):
        model_shape.read("model.path", str(tmp_path))


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ranks,stage,weights,states,sequences",
    [
        (1, 0, 2 * N, 12 * N, 256),
        (1, 2, 2 * N, 12 * N, 256),
        (2, 2, 2 * N, 6 * N, 128),
        (1, 3, 2 * N, 12 * N, 256),
        (2, 3, N, 6 * N, 128),
    ],
)
def test_bytes_of_a_known_shape(qwen: str, ranks: int, stage: int, weights: int, states: int, sequences: int) -> None:
    plan = planning.plan(configured(qwen, train__zero_stage=stage, memory__zero_copy="off"), ranks, H100)
    train, generate = plan.phases["train"].parts, plan.phases["generate"].parts
    assert train["policy weights"] == generate["policy weights"] == weights
    assert train["policy fp32 and AdamW"] == generate["policy fp32 and AdamW"] == states
    head = 1536 if stage < 3 else 1536 // ranks
    assert train["value weights"] == weights + 2 * head
    assert train["reference weights"] == weights
    assert generate["vLLM weights"] == 2 * N
    assert plan.kv_cache_bytes == (sequences * 64 + 1) * 16 * (2 * 28 * 2 * 128 * 2)
    assert generate["KV cache"] == plan.kv_cache_bytes == plan.wanted_kv_bytes
    if stage == 3:
        assert train["ZeRO-3 buffers"] == 2 * (weights + 50_000_000 * 2) + 2 * head
    # A layer: two norms' fp32 inputs and their outputs, q, k, v, attention's output, gate, up, product; its statistics.
    layer = 2 * (4 + 2) * 1536 + 2 * (2 * 1536 + 2 * 256 + 3 * 8960) + 4 * 12
    final = (4 + 2) * 1536
    # Without ZeRO-2's gradients the loss head comes to more.
    backward = 2 * (8960 + 2 * 1536) + 4 * 1536 if stage == 2 else 0
    assert train["activations"] == 8192 * (28 * layer + final + backward)
    assert ("NCCL" in train) == (ranks == 2)


def test_checkpointing_and_small_minibatches_need_less(qwen: str) -> None:
    def activations(**changes: Any) -> int:
        return planning.plan(configured(qwen, **changes), 1, 4 * H100).phases["train"].parts.get("activations", 0)

    full = activations()
    assert activations(train__tokens_per_microbatch=4096) < full
    assert activations(rollout__prompts_per_step=1, rollout__samples_per_prompt=1) <= full / 8 + 1
    assert activations(model__gradient_checkpointing=True, train__tokens_per_microbatch=65536) < 2 * full


@pytest.mark.parametrize(
    "gib,changes,expected",
    [
        (79.1, {}, ("kv", False, False)),
        (70, {}, ("kv", False, True)),
        (70, {"model__gradient_checkpointing": True}, ("kv", False, True)),
        (180, {"model__gradient_checkpointing": True}, ("none", False, True)),
        # To sleep costs less than to compute again.
        (77, {"memory__zero_copy": "off"}, ("level2", False, False)),
        (70, {"memory__zero_copy": "off"}, ("kv", False, True)),
        (79.1, {"memory__sleep": "none", "memory__zero_copy": "off"}, ("none", False, True)),
        (79.1, {"memory__offload": "on"}, ("kv", True, False)),
        (79.1, {"schedule__staleness": 1}, ("none", False, True)),
        (180, {"schedule__staleness": 1}, ("none", False, False)),
    ],
)  # fmt: skip
def test_activations_are_recomputed_where_nothing_else_makes_room(
    qwen: str, gib: float, changes: dict, expected: tuple
) -> None:
    plan = planning.plan(configured(qwen, **changes), 1, int(gib * GIB))
    assert (plan.sleep, plan.offload, plan.checkpointing) == expected, plan.table()
    assert ("recomputed" in plan.decision) == plan.checkpointing
    if plan.checkpointing and "model__gradient_checkpointing" not in changes:
        with pytest.raises(ConfigError, match="too small"):
            planning.plan(configured(qwen, model__gradient_checkpointing=False, **changes), 1, int(gib * GIB))


def test_who_only_generates_recomputes_nothing(qwen: str) -> None:
    plans = planning.plans(split(qwen, model__gradient_checkpointing=True), 2, H100)
    assert {side: plan.checkpointing for side, plan in plans.items()} == {"train": True, "generate": False}
    assert [("recomputed" in plan.table()) for plan in plans.values()] == [True, False]


def test_without_a_reference_and_a_value_model(qwen: str) -> None:
    parts = planning.plan(configured(qwen, algo="rloo", kl__coef=0.0), 1, H100).phases["train"].parts
    assert not any("reference" in name or "value" in name for name in parts)


@pytest.mark.parametrize("stage,size", [(2, 2 * (N + 1536)), (3, N + 1536)])
def test_a_reward_model_lies_beside_the_others(qwen: str, stage: int, size: int) -> None:
    plan = planning.plan(configured(qwen, reward__model=qwen, train__zero_stage=stage), 2, H100)
    assert {phase.parts["reward model"] for phase in plan.phases.values()} == {size}


# -- decisions ---------------------------------------------------------------------------------------------------------

LONG = {
    "rollout__max_response_tokens": 4096,
    "train__tokens_per_microbatch": 8192,
    "model__gradient_checkpointing": True,
}


@pytest.mark.parametrize(
    "gib,changes,expected",
    [
        (79.1, {}, (True, "kv", False)),
        (95, {}, (True, "none", False)),
        (95, {"memory__zero_copy": "off"}, (False, "none", False)),
        (81, {"memory__zero_copy": "off"}, (False, "kv", False)),
        (77, {"memory__zero_copy": "off"}, (False, "level2", False)),
        (73, LONG | {"memory__zero_copy": "off"}, (False, "kv", False)),
        (66, LONG | {"memory__zero_copy": "off"}, (False, "level2", False)),
        (64, LONG | {"memory__zero_copy": "off"}, (False, "level2", True)),
        (79.1, {"memory__sleep": "level2"}, (False, "level2", False)),
        (95, {"memory__sleep": "level1"}, (False, "level1", False)),
        (95, {"memory__sleep": "kv", "memory__offload": "on"}, (True, "kv", True)),
        (95, {"generation__backend": "hf"}, (False, "none", False)),
    ],
)  # fmt: skip
def test_the_cheapest_arrangement_that_fits_is_taken(qwen: str, gib: float, changes: dict, expected: tuple) -> None:
    plan = planning.plan(configured(qwen, **changes), 1, int(gib * GIB))
    assert (plan.zero_copy, plan.sleep, plan.offload) == expected, plan.table()
    assert all(phase.total <= 0.95 * gib * GIB for phase in plan.phases.values())
    train = plan.phases["train"].parts
    asleep = plan.sleep != "none" or changes.get("generation__backend") == "hf"
    assert ("KV cache" in train) == (not asleep)
    assert train.get("vLLM weights", 0) == (
        2 * N if not plan.zero_copy and plan.sleep in ("none", "kv") and not changes.get("generation__backend") else 0
    )
    generate = plan.phases["generate"].parts
    assert ("policy fp32 and AdamW" in generate) != plan.offload
    host = (24 * N + 12 * 1536 if plan.offload else 0) + (2 * N if plan.sleep == "level1" else 0)
    assert plan.host_bytes == host


@pytest.mark.parametrize(
    "changes,ranks,allowed",
    [
        ({}, 2, True),
        ({"train__zero_stage": 0}, 1, True),
        ({"train__zero_stage": 3}, 2, False),
        ({"generation__tensor_parallel": 2}, 2, False),
        ({"model__dtype": "float16"}, 1, False),
        ({"memory__zero_copy": "off"}, 1, False),
        ({"memory__sleep": "level1"}, 1, False),
        ({"generation__backend": "hf"}, 1, False),
    ],
)  # fmt: skip
def test_when_one_storage_holds_the_weights(qwen: str, changes: dict, ranks: int, allowed: bool) -> None:
    plan = planning.plan(configured(qwen, **changes), ranks, 2 * H100)
    assert plan.zero_copy == allowed
    assert ("vLLM weights" not in plan.phases["generate"].parts) == (allowed or "generation__backend" in changes)


def test_a_vocabulary_that_vllm_pads_is_not_shared(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_1B5 | {"vocab_size": 151937}))
    assert not planning.plan(configured(str(tmp_path)), 1, 2 * H100).zero_copy


def test_a_tensor_parallel_group_shares_weights_and_cache(qwen: str) -> None:
    whole, half = (
        planning.plan(configured(qwen, generation__tensor_parallel=n, memory__zero_copy="off"), 2, H100) for n in (1, 2)
    )
    assert half.phases["generate"].parts["vLLM weights"] == N
    # Twice the sequences an engine, half the heads a rank, and one empty block.
    assert half.wanted_kv_bytes == whole.wanted_kv_bytes - whole.wanted_kv_bytes // (128 * 64 + 1) // 2
    with pytest.raises(ConfigError, match=r"generation\.tensor_parallel \(8\) must divide the model's 12"):
        planning.plan(configured(qwen, generation__tensor_parallel=8), 8, H100)


def test_a_given_cache_is_kept_to(qwen: str) -> None:
    plan = planning.plan(configured(qwen, memory__kv_cache_gib=2.0), 1, H100)
    assert 2 * GIB - 16 * 28672 < plan.kv_cache_bytes <= 2 * GIB


def test_without_a_gpu_nothing_is_predicted(qwen: str) -> None:
    plan = planning.plan(configured("/nowhere"), 2, 0)
    assert (plan.sleep, plan.offload, plan.zero_copy, plan.kv_cache_bytes) == ("none", False, False, GIB)
    assert plan.phases == {} and plan.errors({"train": 1}) == {} and "no GPU" in plan.table()
    assert not plan.checkpointing
    changes = {"memory__kv_cache_gib": 0.25, "memory__offload": "on", "model__gradient_checkpointing": True}
    plan = planning.plan(configured("/nowhere", **changes), 2, 0)
    assert (plan.offload, plan.kv_cache_bytes, plan.checkpointing) == (True, GIB // 4, True)


# -- schedules ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["vllm", "hf"])
def test_one_batch_ahead_everything_is_awake_at_once(qwen: str, backend: str) -> None:
    turns = planning.plan(
        configured(qwen, generation__backend=backend, memory__zero_copy="off", memory__sleep="none"), 1, 2 * H100
    )
    plan = planning.plan(configured(qwen, generation__backend=backend, schedule__staleness=1), 1, 2 * H100)
    assert (plan.sleep, plan.offload, plan.zero_copy, plan.host_bytes) == ("none", False, False, 0)
    assert plan.phases.keys() == {"train"} and plan.kv_cache_bytes == turns.kv_cache_bytes == plan.wanted_kv_bytes
    generate, train = turns.phases["generate"].parts, turns.phases["train"].parts
    assert plan.phases["train"].parts == generate | train
    assert (
        plan.phases["train"].total
        == sum((generate | train).values())
        > max(phase.total for phase in turns.phases.values())
    )
    assert "at the same time" in plan.decision and "weights of its own" in plan.decision


def test_one_batch_ahead_the_cache_takes_what_is_left(qwen: str) -> None:
    changes = {"schedule__staleness": 1, "rollout__max_response_tokens": 4096, "model__gradient_checkpointing": True}
    roomy, plan = (planning.plan(configured(qwen, **changes), 1, int(gib * GIB)) for gib in (180, 100))
    assert roomy.kv_cache_bytes == roomy.wanted_kv_bytes == plan.wanted_kv_bytes
    assert 0.2 * 100 * GIB <= plan.kv_cache_bytes < plan.wanted_kv_bytes
    assert 0 <= 0.95 * 100 * GIB - plan.phases["train"].total < 16 * 28672
    with pytest.raises(ConfigError, match=r"'KV cache' .*lower memory\.kv_cache_gib"):
        planning.plan(configured(qwen, memory__kv_cache_gib=60.0, **changes), 1, 100 * GIB)


def test_what_cannot_be_awake_at_once_is_refused_with_the_way_out(qwen: str) -> None:
    changes = {"train__tokens_per_microbatch": 7680, "model__gradient_checkpointing": False}
    config = configured(qwen, schedule__staleness=1, **changes)
    total = planning.plan(config, 1, 2 * H100).phases["train"].total
    assert planning.plan(configured(qwen), 1, H100).sleep == "kv"  # in turns it fits
    with pytest.raises(ConfigError) as error:
        planning.plan(config, 1, H100)
    missing = total - int(0.95 * H100)
    for needle in (
        "schedule.staleness 1 on the same GPUs has sampler and trainer awake at once",
        f"needs {total / GIB:.2f} GiB, {missing / GIB:.2f} GiB more than",
        "the largest part is 'value fp32 and AdamW'",
        "raise train.zero_stage",
        "or take schedule.placement split or schedule.staleness 0",
    ):
        assert needle in str(error.value), error.value
    assert "\n" not in str(error.value)


def split(path: str, **changes: Any) -> Config:
    return configured(path, schedule__placement="split", **changes)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_sides_of_a_split_run_add_up(qwen: str, staleness: int) -> None:
    plans = planning.plans(split(qwen, schedule__staleness=staleness, memory__sleep="level2"), 2, 2 * H100)
    assert list(plans) == ["train", "generate"]
    for side, plan in plans.items():
        assert list(plan.phases) == [side]
        assert (plan.sleep, plan.offload, plan.zero_copy, plan.host_bytes) == ("none", False, False, 0)
    train, generate = (plans[side].phases[side].parts for side in ("train", "generate"))
    assert train.keys() & generate.keys() == {"CUDA and libraries", "NCCL"}
    assert not {"KV cache", "sampling"} & train.keys() and plans["train"].kv_cache_bytes == 0
    together = planning.plan(configured(qwen, schedule__staleness=1), 1, 2 * H100).phases["train"].parts
    assert train | generate == together | {"NCCL": 512 * 2**20}
    assert generate["KV cache"] == plans["generate"].kv_cache_bytes == (256 * 64 + 1) * 16 * 28672
    assert "only training" in plans["train"].decision and "KV cache" not in plans["train"].decision
    assert "only generation" in plans["generate"].decision and "100%" in plans["generate"].decision


def test_each_side_counts_its_own_ranks(qwen: str) -> None:
    config = split(qwen, schedule__generators=4, generation__tensor_parallel=2)
    plans = planning.plans(config, 6, H100)
    train, generate = plans["train"].phases["train"].parts, plans["generate"].phases["generate"].parts
    assert train["policy fp32 and AdamW"] == 6 * N
    assert generate["vLLM weights"] == N
    # 256 episodes on two engines, half the heads a rank.
    assert generate["KV cache"] == (128 * 64 + 1) * 16 * 28672 // 2
    assert "2 ranks that train, ZeRO-2" in plans["train"].table()
    assert "4 ranks that generate, tensor parallel 2" in plans["generate"].table()
    few = planning.plans(split(qwen, generation__max_batch=32), 2, H100)["generate"]
    assert few.kv_cache_bytes == (32 * 64 + 1) * 16 * 28672


@pytest.mark.parametrize(
    "changes,needles",
    [
        ({"train__tokens_per_microbatch": 4096}, ["training needs", "train.zero_stage"]),
        ({"memory__kv_cache_gib": 78.0}, ["generating needs", "'KV cache'", "lower memory.kv_cache_gib"]),
        ({"generation__max_batch": 10**5}, ["generating needs", "'sampling'", "lower generation.max_batch"]),
    ],
)  # fmt: skip
def test_either_side_may_be_too_large(qwen: str, changes: dict, needles: list[str]) -> None:
    many = {"rollout__prompts_per_step": 2**16, "train__minibatches_per_batch": 2**12}
    gib = 40 if "train__tokens_per_microbatch" in changes else 79.1
    with pytest.raises(ConfigError) as error:
        planning.plans(
            split(qwen, **(many if "generation__max_batch" in changes else {}), **changes), 2, int(gib * GIB)
        )
    for needle in needles:
        assert needle in str(error.value), error.value


def test_both_sides_of_a_run_make_the_same_plans(qwen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "gpu_bytes", lambda config: H100)
    config, gpu = split(qwen, schedule__generators=2), torch.device("cuda")
    worlds = World(0, 3, gpu), World(1, 2, gpu, first=3)
    monkeypatch.setattr(World, "max", lambda self, value: value)
    trainer, generator = (build.memory_plans(config, world) for world in worlds)
    assert trainer == generator == planning.plans(config, 5, H100)


@pytest.mark.parametrize("schedule", [{"schedule__placement": "split"}, {"schedule__staleness": 1}])
def test_without_a_gpu_what_runs_ahead_does_not_sleep_either(schedule: dict) -> None:
    changes = {"memory__sleep": "level2", "memory__offload": "on", "memory__kv_cache_gib": 0.25}
    for plan in planning.plans(configured("/nowhere", **schedule, **changes), 2, 0).values():
        assert (plan.sleep, plan.offload, plan.kv_cache_bytes, plan.phases) == ("none", False, GIB // 4, {})


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gib,changes,needles",
    [
        (
            40,
            {"train__tokens_per_microbatch": 4096},
            ["training needs", "more than the 38.00 GiB", "value fp32 and AdamW", "train.zero_stage"],
        ),
        (
            79.1,
            {"train__tokens_per_microbatch": 65536, "model__gradient_checkpointing": False},
            ["'activations'", "lower train.tokens_per_microbatch; or set model.gradient_checkpointing true"],
        ),
        (40, {"train__tokens_per_microbatch": 2**19, "algo": "rloo"}, ["lower train.tokens_per_microbatch"]),
        (
            72,
            {"train__zero_stage": 0, "model__gradient_checkpointing": False},
            ["'value fp32 and AdamW'", "raise train.zero_stage", "; or set model.gradient_checkpointing true"],
        ),
        (79.1, {"memory__kv_cache_gib": 60.0, "memory__offload": "off"}, ["generating", "'KV cache'", "kv_cache_gib"]),
    ],
)  # fmt: skip
def test_too_small_a_gpu_names_part_bytes_and_remedy(qwen: str, gib: float, changes: dict, needles: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        planning.plan(configured(qwen, **changes), 1, int(gib * GIB))
    for needle in needles:
        assert needle in str(error.value), error.value
    said = "gradient_checkpointing" in str(error.value)
    assert said == any("gradient_checkpointing" in needle for needle in needles), "only where it would help"
    assert "\n" not in str(error.value)


def test_a_cache_that_may_not_sleep_has_to_fit_beside_training(qwen: str) -> None:
    config = configured(qwen, memory__sleep="none", memory__kv_cache_gib=2.0, model__gradient_checkpointing=False)
    needed = planning.plan(config, 1, H100).phases["train"].total + 1
    planning.plan(config, 1, int(needed / 0.95) + 16 * 28672)
    with pytest.raises(ConfigError, match="training needs"):
        planning.plan(config, 1, int(needed / 0.95) - 2 * 16 * 28672)


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize("sleep,refused", [("kv", True), ("level2", True), ("none", False)])
def test_expandable_segments_beside_a_sleeping_engine(
    qwen: str, monkeypatch: pytest.MonkeyPatch, variable: str, sleep: str, refused: bool
) -> None:
    config = configured(qwen, memory__sleep=sleep)
    monkeypatch.setenv(variable, "max_split_size_mb:128,expandable_segments:False")
    planning.plan(config, 1, 2 * H100)
    monkeypatch.setenv(variable, "max_split_size_mb:128,expandable_segments:True")
    if refused:
        with pytest.raises(ConfigError, match=variable):
            planning.plan(config, 1, 2 * H100)
    else:
        planning.plan(config, 1, 2 * H100)


# -- what a person sees ------------------------------------------------------------------------------------------------


def test_plan_errors_are_relative() -> None:
    plan = MemoryPlan("kv", False, True, 5, {"generate": Phase({"a": 30, "b": 70}), "train": Phase({"a": 200})})
    assert plan.errors({"generate": 110, "train": 190}) == pytest.approx(
        {"memory/plan_error_generate": 0.1, "memory/plan_error_train": -0.05}
    )
    assert plan.errors({"train": 200}) == {"memory/plan_error_train": 0.0}


def test_the_table_adds_up(qwen: str) -> None:
    plan = planning.plan(
        configured(qwen, memory__zero_copy="off", memory__sleep="level1", memory__offload="on"), 1, H100
    )
    lines = plan.table().splitlines()
    assert lines[1].split() == ["generate", "train"]
    rows = {line[:28].strip(): line[28:].split() for line in lines[2:-2]}
    for column, phase in enumerate(("generate", "train")):
        numbers = [float(row[column].replace("-", "0")) for name, row in rows.items() if name not in ("total", "free")]
        assert sum(numbers) == pytest.approx(float(rows["total"][column]), abs=0.06)
        assert float(rows["total"][column]) == pytest.approx(plan.phases[phase].total / GIB, abs=0.006)
        assert float(rows["total"][column]) + float(rows["free"][column]) == pytest.approx(79.1, abs=0.02)
    assert "level 1" in lines[-1] and "host memory" in lines[-1] and "100%" in lines[-1]
    assert any("host memory of a rank: 37.38 GiB" in line for line in lines)


def test_explain_prints_the_plan_alone(qwen: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w3"}\n')
    command = [sys.executable, "-m", "engine.run", "--memory.explain", "true", "--memory.gpu_gib", "80",
               "--generation.backend", "vllm", "--data.path", str(tmp_path / "prompts.jsonl"), "--reward.function",
               "math:sqrt", "--model.path", qwen, "--model.dtype", "bfloat16", "--launch.ranks", "2",
               "--output_dir", str(tmp_path / "runs")]  # fmt: skip
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert (
        result.stdout.startswith("memory   GiB on each GPU of 80.00, predicted; 2 ranks")
        and "decision: " in result.stdout
    )
    assert not (tmp_path / "runs").exists()
    too_small = subprocess.run([*command, "--memory.gpu_gib", "8"], cwd=ROOT, capture_output=True, text=True)
    assert too_small.returncode == 2 and too_small.stderr.startswith("error: the GPU is too small")


@pytest.mark.parametrize(
    "schedule,gib,heads",
    [
        (["--schedule.placement", "split"], "80", ["1 rank that trains, ZeRO-0", "1 rank that generates, tensor par"]),
        (["--schedule.staleness", "1"], "80", ["2 ranks, ZeRO-0"]),
        (["--schedule.staleness", "1"], "40", []),
    ],
)  # fmt: skip
def test_explain_shows_what_the_schedule_needs(
    qwen: str, tmp_path: Path, capsys: pytest.CaptureFixture, schedule: list[str], gib: str, heads: list[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w3"}\n')
    command = ["--memory.explain", "true", "--memory.gpu_gib", gib, "--generation.backend", "vllm", "--algo", "rloo",
               "--data.path", str(tmp_path / "prompts.jsonl"), "--reward.function", "math:sqrt", "--model.path", qwen,
               "--model.dtype", "bfloat16", "--launch.ranks", "2"]  # fmt: skip
    status = run.main([*command, *schedule])
    said = capsys.readouterr()
    assert status == (0 if heads else 2)
    assert said.err.startswith("" if heads else "error: the GPU is too small: schedule.staleness 1")
    tables = said.out.splitlines()
    found = [line for line in tables if line.startswith("memory")]
    assert [head in line for head, line in zip(heads, found, strict=True)] == [True] * len(heads)
    assert len([line for line in tables if line.startswith("  decision: ")]) == len(heads)


# -- the driver --------------------------------------------------------------------------------------------------------


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvidia-smi that answers for two GPUs and leaves its arguments in a file."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\necho "81559, 600"\necho "40960, 512"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "asked"


def test_gpu_memory_is_the_smallest_card_s(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured("x")
    assert planning.gpu_bytes(config) == (40960 - 512) * 2**20
    assert "-i" not in driver.read_text()
    assert planning.gpu_bytes(configured("x", memory__gpu_gib=8.0)) == 8 * GIB
    assert planning.gpu_bytes(configured("x", memory__gpu_gib=800.0)) == (40960 - 512) * 2**20
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-1")
    planning.gpu_bytes(config)
    assert driver.read_text().split()[-2:] == ["-i", "3,GPU-1"]


def test_a_silent_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"set memory\.gpu_gib"):
        planning.gpu_bytes(configured("x"))
    assert planning.gpu_bytes(configured("x", memory__gpu_gib=8.0)) == 8 * GIB


# -- rows in the place of a sampler ------------------------------------------------------------------------------------


def test_training_on_rows_plans_no_sampler(qwen: str) -> None:
    """Weights, states and passes of the policy: as much as PPO's own policy takes, and nothing of vLLM."""
    rows = {"model": {"path": qwen, "dtype": "bfloat16"}, "data": {"path": "rows.jsonl", "max_row_tokens": 1024}}
    config = Config.model_validate({"algo": "sft", "train": {"zero_stage": 2, "rows_per_step": 256}, **rows})
    plan = planning.plan(config, 1, H100)
    both = planning.plan(configured(qwen, memory__sleep="level2"), 1, H100)
    assert plan.phases.keys() == {"train"} and (plan.sleep, plan.offload, plan.kv_cache_bytes) == ("none", False, 0)
    parts = plan.phases["train"].parts
    assert not [name for name in parts if "vLLM" in name or "KV" in name or "sampl" in name]
    for name in ("policy weights", "policy fp32 and AdamW"):
        assert parts[name] == both.phases["train"].parts[name]
    assert plan.decision == "only training here: nothing sleeps"


def test_a_reward_model_in_training_has_no_language_head(qwen: str) -> None:
    """Its head is one row of a matrix, and no loss needs the vocabulary; with adapters it is trained beside them."""
    rows = {"model": {"path": qwen, "dtype": "bfloat16"}, "data": {"path": "rows.jsonl", "max_row_tokens": 1024}}
    config = Config.model_validate({"algo": "reward_model", **rows})
    parts = planning.plan(config, 1, H100).phases["train"].parts
    assert parts["reward model weights"] == 2 * (N + 1536)
    assert parts["reward model fp32 and AdamW"] == 12 * (N + 1536)
    assert "loss head" not in parts and not [name for name in parts if "policy" in name]
    adapted = config.model_copy(update={"lora": config.lora.model_copy(update={"rank": 8})})
    trained = model_shape.read("model.path", qwen).adapters(8) + 1536
    assert planning.plan(adapted, 1, H100).phases["train"].parts["reward model fp32 and AdamW"] == 12 * trained


# -- optimizers in host memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage,ranks", [(2, 1), (2, 4), (3, 4)])
def test_optimizers_on_the_cpu_take_host_memory_instead(qwen: str, stage: int, ranks: int) -> None:
    """Of PPO's two models, 20 bytes a parameter: fp32 weights, moments and gradient, and twice two bytes."""
    plan = planning.plan(configured(qwen, train__zero_stage=stage, train__optimizer_offload="cpu"), ranks, H100)
    other = planning.plan(configured(qwen, train__zero_stage=stage), ranks, H100)
    assert not plan.offload and "optimizer on the CPU" in plan.table()
    train, before = plan.phases["train"].parts, other.phases["train"].parts
    assert not {"policy fp32 and AdamW", "value fp32 and AdamW"} & train.keys()
    assert train["policy weights"] == before["policy weights"]
    assert plan.host_bytes == pytest.approx(20 * 2 * N / ranks, rel=1e-3)
    embedding = 1536 * 151936
    assert train[f"ZeRO-{stage} buffers"] == 2 * 2 * (embedding if stage == 2 else 50_000_000)


def test_a_gpu_that_is_too_small_names_it_where_it_would_help(qwen: str) -> None:
    with pytest.raises(ConfigError, match=r"too small.*; or set train\.optimizer_offload cpu$"):
        planning.plan(configured(qwen), 1, 40 * GIB)
    with pytest.raises(ConfigError, match=r"; or set train\.optimizer_offload cpu with train\.zero_stage 2$"):
        planning.plan(configured(qwen, train__zero_stage=0), 1, 40 * GIB)
    planning.plan(configured(qwen, train__optimizer_offload="cpu"), 1, 40 * GIB)
    for changes in ({"train__optimizer_offload": "cpu"}, {}, {"model__dtype": "float16"}):
        with pytest.raises(ConfigError, match="too small") as refused:
            planning.plan(configured(qwen, **changes), 1, 8 * GIB)
        assert "optimizer_offload" not in str(refused.value)


def test_a_machine_with_too_little_memory_for_them_is_refused(qwen: str) -> None:
    config = configured(qwen, train__optimizer_offload="cpu")
    plan = planning.plan(config, 1, H100)
    with pytest.raises(ConfigError, match=r"^train\.optimizer_offload cpu needs .* GiB of host memory"):
        planning.check_host(config, plan, 10_000)
    planning.check_host(configured(qwen), planning.plan(configured(qwen, memory__offload="on"), 1, H100), 10_000)
