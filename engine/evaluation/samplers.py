"""A sampler of its own for one model, outside of any run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from engine.config import Config, ConfigError
from engine.generation.base import Generator
from engine.machine.world import World

GIB = 2**30
SPARE = 4 * GIB
"""Bytes of a GPU left to vLLM's activations and CUDA graphs."""


@contextlib.contextmanager
def opened(config: Config, longest_prompt: int, world: World) -> Iterator[Generator]:
    """The sampler of ``config.model.path``, closed on the way out.

    Args:
        longest_prompt: in tokens.

    Raises:
        ConfigError: no room is left for vLLM's KV cache.
    """
    path, generation = str(config.model.path), config.generation
    generator: Generator
    if generation.backend == "hf":
        from engine.generation.hf import HFGenerator

        dtype = getattr(torch, config.model.dtype)
        generator = HFGenerator(path, dtype=dtype, device=world.device, max_batch=generation.max_batch)
    else:
        from engine.generation.vllm import VLLMGenerator

        generator = VLLMGenerator(
            path,
            dtype=config.model.dtype,
            max_model_len=longest_prompt + config.rollout.max_response_tokens + 1,
            max_num_seqs=generation.max_batch,
            seed=config.seed,
            kv_cache_bytes=_kv_cache_bytes(config, path, world),
        )
    try:
        yield generator
    finally:
        generator.close()


def _kv_cache_bytes(config: Config, path: str, world: World) -> int:
    """As ``memory.kv_cache_gib`` says; by default what a GPU has left beside the weights, on a CPU 1 GiB."""
    if config.memory.kv_cache_gib is not None:
        return int(config.memory.kv_cache_gib * GIB)
    if world.device.type == "cpu":
        return GIB
    free, _ = torch.cuda.mem_get_info(world.device)
    weights = sum(file.stat().st_size for file in Path(path).glob("*.safetensors")) if Path(path).is_dir() else 0
    left = free - weights - SPARE
    if left <= 0:
        raise ConfigError(
            f"the GPU has {free / GIB:.3g} GiB free and the weights of '{path}' take {weights / GIB:.3g}: no room is "
            "left for vLLM's KV cache; say how much by memory.kv_cache_gib, or take generation.backend hf"
        )
    return left
