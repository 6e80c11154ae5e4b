"""vLLM on a GPU, without the patches that it alone needs, still does what they are for.

Each test takes its patch away; those of both builds are in tests/system/test_vllm_patches.py.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from tqdm import tqdm

from engine.generation import shared_weights, vllm_patches
from engine.generation.shared_weights import SharedWeights
from engine.generation.vllm import VLLMGenerator
from engine.machine.world import World, joined
from engine.memory.arrangements import Sleep
from engine.memory.meter import in_use
from tests.system import shared

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

KV_CACHE = 2**29
SHAPE = {"vocab_size": 65536, "hidden_size": 1024, "intermediate_size": 2816, "max_position_embeddings": 256}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with joined("cuda", 5) as one:
        yield one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    shared.make_model("Qwen2", True, **SHAPE).save_pretrained(path)
    return path


def build(folder: Path, sleep: Sleep, weights: SharedWeights | None = None) -> VLLMGenerator:
    gc.collect()
    torch.cuda.empty_cache()
    return VLLMGenerator(
        str(folder),
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=8,
        seed=0,
        kv_cache_bytes=KV_CACHE,
        sleep=sleep,
        shared=weights,
    )


def test_capture_without_bar(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    graphs = importlib.import_module("vllm.v1.worker.gpu.cudagraph_utils")
    monkeypatch.setattr(graphs, "tqdm", tqdm)  # an earlier engine of this process has had it taken away
    monkeypatch.setattr(vllm_patches, "capture_without_bar", lambda: None)
    build(folder, "none").close()
    assert "Capturing CUDA graphs" in capfd.readouterr().err


def test_weights_stay_awake(world: World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleep takes the weights too, so that waking up the KV cache alone leaves an engine without them."""
    monkeypatch.setattr(vllm_patches, "weights_stay_awake", lambda enabled: nullcontext())
    sampler = build(folder, "kv")
    weights = sum(parameter.nbytes for parameter in shared.make_model("Qwen2", True, **SHAPE).parameters())
    awake = in_use(world.device)
    sampler.sleep()
    assert awake - in_use(world.device) > KV_CACHE + weights // 4
    sampler.close()


def test_matrices_without_memory(world: World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own lie on the GPU when the trainer's are about to replace them."""
    taken, bind = [], SharedWeights.bind

    def bound(weights: SharedWeights, model: object) -> None:
        taken.append(torch.cuda.memory_allocated() - before)
        bind(weights, model)

    monkeypatch.setattr(SharedWeights, "bind", bound)
    for patched in (True, False):
        trained = shared.train(folder, 0, "bfloat16")
        if not patched:
            monkeypatch.setattr(shared_weights, "matrices_without_memory", nullcontext)
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        build(folder, "none", SharedWeights(trained)).close()
    assert taken[1] > taken[0] + SHAPE["vocab_size"] * SHAPE["hidden_size"]


def test_wake_up(world: World, folder: Path) -> None:
    """vLLM's own, with too little memory free, fails and leaves some of it taken: the last test, since the engine
    cannot be closed after that."""
    sampler = build(folder, "level2")
    sampler.sleep()
    asleep = in_use(world.device)
    hog = torch.empty(torch.cuda.mem_get_info()[0] - KV_CACHE * 3 // 4, dtype=torch.uint8, device=world.device)
    with pytest.raises(RuntimeError):
        sampler._llm.wake_up(tags=["kv_cache"])
    del hog
    torch.cuda.empty_cache()
    assert in_use(world.device) > asleep + KV_CACHE // 4
