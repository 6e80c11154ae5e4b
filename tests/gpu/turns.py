"""Sampler and trainer taking turns on GPUs; test_colocation starts it, on one rank or two.

Usage: turns.py MODEL ZERO_STAGE TENSOR_PARALLEL SLEEP copied|shared
"""

from __future__ import annotations

import statistics
import sys
import time

import numpy as np
import pytest
import torch

from engine.config import Config
from engine.generation.base import WrongStateError
from engine.generation.sampling import Request, Sampling
from engine.generation.vllm import VLLMGenerator
from engine.machine.world import World, joined
from engine.memory.meter import in_use
from engine.memory.planning import MemoryPlan
from engine.schedules.colocation import Colocation
from engine.start.build import PROBE_TOKENS
from engine.training import models, weights
from engine.training.trainer import Trainer
from tests.system.colocated import samples_of, two_large_steps, whole_and_in_time

KV_BYTES = 2**30
PROMPTS = [[5, 6, 7], [8] * 70, [9, 10], list(range(20, 120))]
GREEDY, WARM = Sampling(PROBE_TOKENS, 0.0, ()), Sampling(64, 1.0, ())


def colocation(model: str, plan: MemoryPlan, world: World, stage: int, tensor_parallel: int) -> Colocation:
    return Colocation(
        world,
        plan,
        lambda: _unplanned(),
        PROMPTS,
        tokens=PROBE_TOKENS,
        source=None,
        build_generator=lambda plan, shared: VLLMGenerator(
            model,
            dtype="bfloat16",
            max_model_len=256,
            max_num_seqs=16,
            seed=0,
            kv_cache_bytes=plan.kv_cache_bytes,
            sleep=plan.sleep,
            tensor_parallel=tensor_parallel,
            shared=shared,
        ),
        build_trainer=lambda: trainer(model, stage, world),
        say=print,
    )


def _unplanned() -> MemoryPlan:
    raise AssertionError("the weights were to be shared")


def trainer(model: str, stage: int, world: World) -> Trainer:
    """A policy and a value model, at a learning rate at which every step shows."""
    train = {"zero_stage": stage, "tokens_per_microbatch": 2048, "learning_rate": 1e-3, "steps": 4}
    config = Config.model_validate(
        {
            "algo": "ppo",
            "model": {"dtype": "bfloat16"},
            "train": train,
            "generation": {"max_logprob_gap": 100.0},
            "kl": {"coef": 0.0},
        }
    )
    torch.manual_seed(0)
    value, _ = models.load_value(model, dtype=torch.bfloat16)
    return Trainer(config, world, policy=models.load_policy(model, dtype=torch.bfloat16), reference=None, value=value)


def cycles(turns: Colocation, count: int, world: World) -> None:
    """The same weights over and over: the same tokens, the same memory; prints the seconds.

    The tokens are those of the proof, which found no keys in the cache either: with some there, fewer tokens go through
    the first products, and products of another shape round differently.
    """
    asleep, seconds = [], []
    awake = in_use(world.device)
    for _ in range(count):
        started = time.perf_counter()
        turns.rest()
        torch.cuda.synchronize()
        slept = time.perf_counter()
        asleep.append(in_use(world.device))
        turns.make_room()
        room = time.perf_counter()
        turns.hand_over(0)
        torch.cuda.synchronize()
        seconds.append((slept - started) + (time.perf_counter() - room))
        assert turns._greedy() == turns.answers
    assert max(abs(size / asleep[1] - 1) for size in asleep[1:]) <= 0.01, asleep
    if turns.plan.sleep != "none":
        assert awake - asleep[-1] >= 0.95 * turns.plan.kv_cache_bytes
    name = "shared weights" if turns.plan.zero_copy else turns.plan.sleep
    print(f"rank {world.rank} {name}: {statistics.median(seconds):.3f} s a cycle, first {seconds[0]:.3f} s")


def learns(turns: Colocation, world: World) -> None:
    """After a large step the sampler holds the trainer's weights, and no key of the old ones."""
    before = turns._greedy()
    two_large_steps(turns)
    assert turns._greedy() != before
    requests = [Request(prompt, seed + 100 * world.rank) for prompt in PROMPTS for seed in range(4 - world.rank)]
    samples = samples_of(turns.generator.generate(requests, WARM), requests)
    own = turns.trainer.logprobs(turns.trainer.policy, samples).numpy()
    gap = float(np.abs(np.concatenate([one.behaviour_logprobs for one in samples]) - own).mean())
    print(f"rank {world.rank}: gap {gap:.4f} nats")
    assert gap <= 0.02


def without_weights_it_cannot_be_ready(turns: Colocation) -> None:
    turns.generator.sleep()
    turns.generator.wake()
    with pytest.raises(WrongStateError, match="without its weights"):
        turns.generator.start()
    with pytest.raises(WrongStateError, match="generate"):
        turns._greedy()
    turns.generator.load_weights(weights.full_weights(turns.trainer.policy), 0)
    turns.generator.start()


def too_little_memory_to_wake_up_is_said(turns: Colocation, world: World) -> None:
    """The numbers are said, nothing leaks, and it works once there is room."""
    turns.generator.sleep()
    asleep = in_use(world.device)
    hog = torch.empty(torch.cuda.mem_get_info()[0] - KV_BYTES // 2, dtype=torch.uint8, device=world.device)
    turns.generator.wake()
    turns.generator.load_weights(weights.full_weights(turns.trainer.policy), 0)
    with pytest.raises(RuntimeError, match=r"kv cache needs [\d,]+ bytes, [\d,]+ are free"):
        turns.generator.start()
    del hog
    torch.cuda.empty_cache()
    assert in_use(world.device) <= 1.01 * asleep
    turns.generator.start()


def closing_gives_the_memory_back(turns: Colocation, tensor_parallel: int, world: World) -> None:
    own = 0 if turns.plan.zero_copy else sum(p.nbytes for _, p in weights.full_weights(turns.trainer.policy))
    torch.cuda.empty_cache()
    held = in_use(world.device)
    turns.generator.close()
    assert held - in_use(world.device) >= 0.95 * (KV_BYTES + own / tensor_parallel)


def main(model: str, stage: str, tensor_parallel: str, sleep: str, holding: str) -> None:
    with joined("cuda", 5) as world:
        plan = MemoryPlan(sleep, sleep == "level2", holding == "shared", KV_BYTES)  # type: ignore[arg-type]
        turns = colocation(model, plan, world, int(stage), int(tensor_parallel))
        assert turns.plan == plan, "no fall-back"
        cycles(turns, 20, world)
        if sleep == "level2":
            without_weights_it_cannot_be_ready(turns)
        elif sleep == "kv" and world.size == 1:
            too_little_memory_to_wake_up_is_said(turns, world)
        learns(turns, world)
        if world.size > 1:
            whole_and_in_time(turns.trainer.policy, world)
        closing_gives_the_memory_back(turns, int(tensor_parallel), world)


if __name__ == "__main__":
    main(*sys.argv[1:])
