"""Makes a run's memory plan, sampler and trainer from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from engine import memory
from engine.colocation import Colocation
from engine.config import Config
from engine.data import Prompt
from engine.distributed import World
from engine.generation.base import Generator
from engine.training import models
from engine.training.trainer import Trainer

if TYPE_CHECKING:
    from engine.generation.shared_weights import SharedWeights

PROBE_PROMPTS = 4
PROBE_TOKENS = 16


def memory_plan(config: Config, world: World) -> memory.MemoryPlan:
    """The plan, the same on all ranks, for the smallest of their GPUs. Collective."""
    size = -int(world.max(-memory.gpu_bytes(config))) if world.device.type == "cuda" else 0
    return memory.plan(config, world.size, size)


def colocation(
    config: Config,
    path: str,
    world: World,
    plan: memory.MemoryPlan,
    prompts: Sequence[Prompt],
    say: Callable[[str], None],
) -> Colocation:
    """Sampler and trainer from the checkpoint at ``path``, their turn proved with the first prompts. Collective."""
    return Colocation(
        world,
        plan,
        lambda: memory_plan(_copying(config), world),
        [prompt.ids for prompt in prompts[:PROBE_PROMPTS]],
        tokens=min(PROBE_TOKENS, config.rollout.max_response_tokens),
        build_generator=lambda plan, shared: _generator(config, path, world, plan, shared),
        build_trainer=lambda: _trainer(config, path, world, say),
        say=say,
    )


def _copying(config: Config) -> Config:
    return config.model_copy(update={"memory": config.memory.model_copy(update={"zero_copy": "off"})})


def _generator(
    config: Config, path: str, world: World, plan: memory.MemoryPlan, shared: SharedWeights | None
) -> Generator:
    generation, rollout = config.generation, config.rollout
    if generation.backend == "hf":
        from engine.generation.hf import HFGenerator

        dtype = getattr(torch, config.model.dtype)
        return HFGenerator(path, dtype=dtype, device=world.device, max_batch=generation.max_batch)
    from engine.generation.vllm import VLLMGenerator

    return VLLMGenerator(
        path,
        dtype=config.model.dtype,
        max_model_len=rollout.max_prompt_tokens + rollout.max_response_tokens,
        max_num_seqs=generation.max_batch,
        seed=config.seed,
        kv_cache_bytes=plan.kv_cache_bytes,
        sleep=plan.sleep,
        tensor_parallel=generation.tensor_parallel,
        shared=shared,
    )


def _trainer(config: Config, path: str, world: World, say: Callable[[str], None]) -> Trainer:
    checkpointing, dtype = config.model.gradient_checkpointing, getattr(torch, config.model.dtype)
    policy = models.load_policy(path, checkpointing, dtype)
    frozen = config.model.reference_path or path
    reference = models.load_policy(frozen, dtype=dtype) if config.kl.coef > 0 else None
    value = None
    if config.algo == "ppo":
        value_path = config.model.value_path or path
        value, new_head = models.load_value(value_path, checkpointing, dtype)
        if new_head:
            say(f"The value model starts from {value_path} with a new head, at zero")
    return Trainer(config, world, policy=policy, reference=reference, value=value)
