"""One storage for trainer and sampler on a GPU: behind compiled code and CUDA graphs, and while the cache sleeps."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from engine.generation.sampling import Request, Sampling
from engine.generation.shared_weights import SharedWeights
from engine.generation.vllm import VLLMGenerator
from engine.machine.world import World, joined
from engine.memory.arrangements import Sleep
from engine.training import weights
from tests.system import shared

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

MAX_LEN, KV_CACHE = 256, 2**29
GREEDY = Sampling(max_tokens=24, temperature=0.0, stop_token_ids=())
PROMPTS = [[1, 5, 9], [1, *range(3, 43)], [7] * 60]
SHAPE = {"vocab_size": 65536, "hidden_size": 1024, "intermediate_size": 2816, "max_position_embeddings": MAX_LEN}


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A sampler has been there: what libraries allocate once is not any later one's."""
    path = tmp_path_factory.mktemp("first")
    shared.make_model("Qwen2", True, **SHAPE).save_pretrained(path)
    with joined("cuda", 5) as world:
        with built(path, "none", None) as (sampler, _):
            sampled(sampler)
        yield world


@contextmanager
def built(path: Path, sleep: Sleep, shared_weights: SharedWeights | None) -> Iterator[tuple[VLLMGenerator, int]]:
    """A sampler, and the bytes of PyTorch's memory that it took."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    sampler = VLLMGenerator(
        str(path),
        dtype="bfloat16",
        max_model_len=MAX_LEN,
        max_num_seqs=8,
        seed=0,
        kv_cache_bytes=KV_CACHE,
        sleep=sleep,
        shared=shared_weights,
    )
    gc.collect()
    try:
        yield sampler, torch.cuda.memory_allocated() - before
    finally:
        sampler.close()
        del sampler
        gc.collect()
        torch.cuda.empty_cache()


def sampled(sampler: VLLMGenerator) -> list[list[int]]:
    return [one.token_ids for one in sampler.generate([Request(prompt, 0) for prompt in PROMPTS], GREEDY)]


def hand_over(sampler: VLLMGenerator, version: int, tensors: list[tuple[str, torch.Tensor]]) -> None:
    sampler.sleep()
    sampler.wake()
    sampler.load_weights(iter(tensors), version)
    sampler.start()


@pytest.mark.parametrize("kind, tied, stage", [("Qwen2", True, 2), ("Llama", False, 1), ("Qwen3", True, 0)])
def test_shared_weights_equal_copied_ones_and_take_no_memory(kind: str, tied: bool, stage: int, tmp_path: Path) -> None:
    shared.make_model(kind, tied, **SHAPE).save_pretrained(tmp_path)
    engine = shared.train(tmp_path, stage, "bfloat16", learning_rate=0.05)
    one = SharedWeights(engine)
    assert one.fits() is None
    kept, seen = [], []
    with built(tmp_path, "none", one) as (sampler, bytes_shared):
        for number in range(3):
            if number:
                shared.step(engine, number)
                hand_over(sampler, number, [])
            seen.append(sampled(sampler))
            kept.append([(name, tensor.clone().cpu()) for name, tensor in weights.full_weights(engine)])
    assert seen[0] != seen[1] != seen[2]
    with built(tmp_path, "none", None) as (sampler, bytes_copied):
        for number, tensors in enumerate(kept):
            hand_over(sampler, number, [(name, tensor.cuda()) for name, tensor in tensors])
            assert sampled(sampler) == seen[number], f"after step {number}"
    matrices = sum(tensor.nbytes for _, tensor in kept[0] if tensor.ndim > 1)
    assert bytes_copied - bytes_shared == pytest.approx(matrices, rel=0.25)


def test_only_the_cache_sleeps(tmp_path: Path) -> None:
    """Cycles of sleep, optimizer step, hand-over: the weights train while the cache is away."""
    shared.make_model("Qwen2", True, **SHAPE).save_pretrained(tmp_path)
    engine = shared.train(tmp_path, 2, "bfloat16", learning_rate=0.05)
    shared.step(engine, 0)  # optimizer states come to be
    with built(tmp_path, "kv", SharedWeights(engine)) as (sampler, _):
        before = sampled(sampler)
        for cycle in range(3):
            awake = torch.cuda.mem_get_info()[0]
            sampler.sleep()
            assert torch.cuda.mem_get_info()[0] - awake == pytest.approx(KV_CACHE, rel=0.1)
            sampler.wake()
            sampler.load_weights(iter(()), cycle)
            sampler.start()
            assert sampled(sampler) == before, cycle
        sampler.sleep()
        shared.step(engine, 1)
        sampler.wake()
        sampler.load_weights(iter(()), 3)
        sampler.start()
        assert sampled(sampler) != before
