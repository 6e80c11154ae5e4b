"""The trainer's weights are the sampler's: real DeepSpeed's buffers, and real vLLM generating from them."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from engine.generation.sampling import Request, Sampling
from engine.generation.shared_weights import SharedWeights
from engine.generation.vllm import VLLMGenerator
from engine.machine.world import World, joined
from engine.training.weights import full_weights
from tests.system import losing, shared
from tests.system.helpers import run_ranks

MAX_LEN = 64
GREEDY = Sampling(max_tokens=12, temperature=0.0, stop_token_ids=())
PROMPTS = [[1, 5, 9], [1, *range(3, 43)]]
TIED = {"Qwen2": True, "Llama": False, "Qwen3": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder for each kind, by its name."""
    folder = tmp_path_factory.mktemp("shared")
    for kind in shared.KINDS:
        shared.make_model(kind, TIED[kind], max_position_embeddings=MAX_LEN).save_pretrained(folder / kind)
    return folder


@pytest.fixture(scope="module")
def alone() -> Iterator[World]:
    with joined("cpu", 5) as world:
        yield world


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM on a CPU multiplies by its weights as they are, as on a GPU, and not by a repacked copy."""

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = functional.linear

    utils = importlib.import_module("vllm.model_executor.layers.utils")
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", plain)


def build(path: Path, weights: SharedWeights) -> VLLMGenerator:
    return VLLMGenerator(
        str(path), dtype="float32", max_model_len=MAX_LEN, max_num_seqs=4, seed=0, kv_cache_bytes=2**24, shared=weights
    )


def sampled(sampler: VLLMGenerator) -> list[list[int]]:
    return [one.token_ids for one in sampler.generate([Request(prompt, 0) for prompt in PROMPTS], GREEDY)]


@torch.no_grad()
def expected(model: PreTrainedModel) -> list[list[int]]:
    """Greedy continuations by transformers alone."""
    rows = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(GREEDY.max_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        rows.append(ids[len(prompt) :])
    return rows


LONG = [pytest.param(*one, marks=pytest.mark.slow) for one in (("Llama", 0), ("Qwen3", 1))]


@pytest.mark.parametrize("kind, stage", [("Qwen2", 2), *LONG])
def test_steps_reach_the_sampler_without_a_load(
    kind: str,
    stage: int,
    folder: Path,
    alone: World,
    unpacked: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fused biases, tied and untied heads, norms of q and k; every step changes all of them.

    Vectors are copied, so their digests are compared: a lost one is named.
    """
    engine = shared.train(folder / kind, stage, "float32")
    weights = SharedWeights(engine)
    oracle = shared.make_model(kind, TIED[kind], max_position_embeddings=MAX_LEN)
    trained = engine.module.model.state_dict()
    assert all(torch.equal(trained[name], one) for name, one in oracle.state_dict().items())
    sampler = build(folder / kind, weights)
    seen = [sampled(sampler)]
    assert seen[0] == expected(oracle)
    for number in (1, 2):
        shared.step(engine, number)
        sampler.sleep()
        sampler.wake()
        sampler.load_weights(full_weights(engine), number)
        sampler.start()
        assert sampler.receipt and not sampler.receipt.lost and not sampler.unread
        assert sampler.receipt.sent.keys() == {name for name, one in trained.items() if one.ndim < 2}
        seen.append(sampled(sampler))
        oracle.load_state_dict(engine.module.model.state_dict())
        assert seen[-1] == expected(oracle)
    assert seen[0] != seen[1] != seen[2]
    with monkeypatch.context() as patch:
        losing.vllm(patch, "model.layers.1.input_layernorm.weight")
        for number in (3, 4):
            sampler.sleep()
            sampler.wake()
            sampler.load_weights(full_weights(engine), number)
            sampler.start()
            shared.step(engine, number)
        assert sampler.receipt.lost == ["model.layers.1.input_layernorm.weight"]

    attention = engine.module.model.model.layers[1].self_attn
    for moved, message in (
        (attention.o_proj, r"no longer uses the trainer's model\.layers\.1\.self_attn\.o_proj\.weight"),
        (attention.k_proj, "the trainer's weights were moved"),
    ):
        kept = moved.weight.data
        moved.weight.data = kept.clone()
        with pytest.raises(RuntimeError, match=message):
            weights.refresh()
        moved.weight.data = kept
    sampler.close()
    gc.collect()
    with pytest.raises(RuntimeError, match="no vLLM engine uses these weights"):
        weights.refresh()


def test_a_repacked_copy_is_not_taken_for_the_trainers_weights(folder: Path, alone: World) -> None:
    """vLLM on a CPU as it is: right at first, and never again."""
    engine = shared.train(folder / "Qwen2", 2, "float32")
    weights = SharedWeights(engine)
    sampler = build(folder / "Qwen2", weights)
    try:
        with pytest.raises(RuntimeError, match=r"vLLM no longer uses the trainer's .*set memory\.zero_copy off"):
            weights.refresh()
    finally:
        sampler.close()


def test_what_cannot_be_shared_is_said(folder: Path, tmp_path: Path, alone: World) -> None:
    shared.make_model("Llama", True, vocab_size=100).save_pretrained(tmp_path / "padded")
    padded = SharedWeights(shared.train(tmp_path / "padded", 2, "bfloat16"))
    assert padded.fits() == "vLLM pads the vocabulary of 100 tokens to a multiple of 64"
    engine = shared.train(folder / "Qwen2", 2, "bfloat16")
    mixed = SharedWeights(engine)
    key = engine.module.model.model.layers[1].self_attn.k_proj.weight
    key.data = key.data.clone()
    assert mixed.fits() == (
        "the parts of model.layers.1.self_attn.qkv_proj.weight do not lie end to end in DeepSpeed's buffer"
    )
    for kind in ("NobodyForCausalLM", "GPTNeoXForCausalLM"):  # none of vLLM's, and one that it has not fused alike
        engine.module.model.__class__ = type(kind, (type(engine.module.model),), {})
        assert f"does not say how it fuses the matrices of {kind}" in str(SharedWeights(engine).fits())


@pytest.mark.slow
def test_two_ranks_keep_the_weights_where_they_are(folder: Path) -> None:
    """ZeRO-0, 1 and 2 in bf16: each rank updates a part of the buffer, and the all-gather fills it in place."""
    run_ranks(2, shared.__file__, str(folder), timeout=120)
