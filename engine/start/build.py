"""Makes a run's memory plan, sampler and trainer from its configuration."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.config import Config
from engine.generation.base import Generator
from engine.generation.equal_weights import LogprobProof
from engine.machine.world import World
from engine.memory import planning
from engine.memory.arrangements import Side
from engine.models import digest
from engine.rollouts.row_source import RowSource
from engine.rollouts.source import Source
from engine.schedules.base import Schedule
from engine.schedules.colocation import Colocation
from engine.schedules.overlapping import Overlapping
from engine.schedules.rows import Rows
from engine.schedules.split import SplitTraining
from engine.start.preflight import Inputs
from engine.training import lora, models
from engine.training.trainer import Trainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from engine.generation.shared_weights import SharedWeights

PROBE_PROMPTS = 4
PROBE_TOKENS = 16


def memory_plans(config: Config, world: World) -> dict[Side, planning.MemoryPlan]:
    """The run's plans, the same on all ranks of a side, for the smallest of their GPUs. Collective."""
    size = -int(world.max(-planning.gpu_bytes(config))) if world.device.type == "cuda" else 0
    processes = world.first + world.size if world.generates else world.size + config.generating_ranks
    return planning.plans(config, processes, size)


@dataclass(frozen=True, slots=True)
class Models:
    """What is trained, and what stays as it is, in host memory until the trainer takes it."""

    policy: models.Policy | models.RewardModel
    """What the run makes."""
    reference: models.Policy | None
    value: models.Value | None
    digests: dict[str, str]
    """Of those that a setting names, by the setting; the same on every rank."""


def load_trained(
    config: Config,
    path: str,
    padding: int | None,
    *,
    checkpointing: bool = False,
    check: models.Check | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> models.Policy | models.RewardModel:
    """The model that the run makes, as it was before training; without adapters.

    Args:
        path: a folder or hub name.
        padding: for a reward model the padding token's id, by ``engine.data.padding``.
    """
    dtype = getattr(torch, config.model.dtype)
    if config.trained == "policy":
        return models.load_policy(path, checkpointing, dtype, check)
    assert padding is not None
    model, new_head = models.load_reward_model(path, padding, config.seed, checkpointing, dtype, check)
    if new_head:
        say(f"The reward model starts from {path} with a new head, drawn from the seed")
    return model


def load_models(
    config: Config,
    path: str,
    world: World,
    *,
    checkpointing: bool,
    say: Callable[[str], None],
    padding: int | None = None,
) -> Models:
    """Loads the models and compares what they compute with transformers; on every rank.

    Args:
        path: the policy's, or reward model's, folder or hub name.
        checkpointing: recompute activations in the backward pass.
        padding: as for ``load_trained``.

    Raises:
        ConfigError: a model cannot be loaded, or computes something else here.
    """
    dtype = getattr(torch, config.model.dtype)

    def check(key: str, place: str) -> models.Check:
        return models.Check(f"{key} '{place}'", world.device)

    with _announced("Loading the models to train", "Loaded them", world, say):
        policy = load_trained(
            config, path, padding, checkpointing=checkpointing, check=check("model.path", path), say=say
        )
        digests = {"model.path": _digest(policy.model, world)}  # before adapters change its names
        if config.lora.rank:
            lora.add_adapters(policy.model, config.lora, config.seed)
        reference = None
        if config.loads_reference:
            other = config.model.reference_path
            compared = check("model.reference_path", other) if other else None  # else it is the policy
            reference = models.load_policy(other or path, dtype=dtype, check=compared)
            if other:
                digests["model.reference_path"] = _digest(reference.model, world)
        value = None
        if config.algorithm.value_model:
            value_path = config.model.value_path or path
            value, new_head = models.load_value(value_path, checkpointing, dtype, check("model.value_path", value_path))
            if new_head:
                say(f"The value model starts from {value_path} with a new head, at zero")
            if config.model.value_path:
                digests["model.value_path"] = _digest(value.model, world)
    return Models(policy, reference, value, digests)


UNMEANT = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")
"""What a configuration says that changes nothing of what its model computes."""


def _digest(model: PreTrainedModel, world: World) -> str:
    """Rank 0's digest of a model's weights and configuration, on all ranks."""
    return str(world.broadcast(base_digest(model) if world.main else None))


def base_digest(model: PreTrainedModel) -> str:
    """A digest of a model's weights and configuration, before adapters change its names."""
    settings = {key: value for key, value in model.config.to_dict().items() if key not in UNMEANT}
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(f"{digest.of_model(model)} {text}".encode()).hexdigest()


def turns(
    config: Config,
    path: str,
    loaded: Models,
    inputs: Inputs,
    world: World,
    plans: dict[Side, planning.MemoryPlan],
    source: Source | RowSource,
    say: Callable[[str], None],
) -> Schedule:
    """Trainer and sampler from the checkpoint at ``path``, as the run's schedule has them, their hand-over proved.

    Collective over the training ranks.

    Args:
        loaded: for the trainer.
        inputs: the first prompts are what the hand-over is proved with.
        source: what to sample; of no use to a split run, whose sampler has its own. Or the rows to train on.
    """
    probe = [prompt.ids for prompt in inputs.prompts[:PROBE_PROMPTS]]
    tokens = min(PROBE_TOKENS, config.rollout.max_response_tokens)

    def trainer() -> Trainer:
        with _announced("Building the trainer", "Built it", world, say):
            return Trainer(config, world, policy=loaded.policy, reference=loaded.reference, value=loaded.value)

    def generator(plan: planning.MemoryPlan, shared: SharedWeights | None) -> Generator:
        starts = f"Starting the sampler ({config.generation.backend})"
        if config.generation.backend == "vllm":
            starts = "Starting vLLM: it compiles the model and captures CUDA graphs, about a minute"
        with _announced(starts, "Started it", world, say):
            return _generator(config, path, inputs, world, plan, shared)

    if isinstance(source, RowSource):
        return Rows(trainer(), plans["train"], source)
    if config.generating_ranks:
        return SplitTraining(config, world, trainer(), plans["train"], plans["generate"], probe, tokens, say)
    colocation = Colocation(
        world,
        plans["train"],
        lambda: memory_plans(_copying(config), world)["train"],
        probe,
        tokens=tokens,
        source=source,
        build_generator=generator,
        build_trainer=trainer,
        say=say,
    )
    if config.schedule.staleness == 0:
        return colocation
    proof = LogprobProof(probe, colocation.answers, config.generation.max_logprob_gap)
    return Overlapping(colocation, proof, config.train.steps)


def sampler(inputs: Inputs, config: Config, world: World, path: str) -> tuple[Generator, Source]:
    """The sampler of a split run from the checkpoint at ``path``, and what it draws. Collective over its ranks."""
    plan = memory_plans(config, world)["generate"]
    generator = _generator(config, path, inputs, world, plan, None)
    return generator, _prompts(config, inputs, world)


def source(config: Config, inputs: Inputs, world: World) -> Source | RowSource:
    """What batches are drawn from: prompts to sample from, or rows."""
    if config.trains_on_rows:
        return RowSource(config, inputs.tokenizer, inputs.rows, inputs.held_out_rows, rank=world.rank, size=world.size)
    return _prompts(config, inputs, world)


def _prompts(config: Config, inputs: Inputs, world: World) -> Source:
    return Source(config, inputs.tokenizer, inputs.prompts, inputs.held_out, rank=world.rank, size=world.size)


@contextmanager
def _announced(before: str, after: str, world: World, say: Callable[[str], None]) -> Iterator[None]:
    """Says what begins and how long it took, on GPUs, where models are large."""
    if world.device.type != "cuda":
        yield
        return
    say(before)
    started = time.perf_counter()
    yield
    say(f"{after} in {time.perf_counter() - started:.0f} s")


def _copying(config: Config) -> Config:
    return config.model_copy(update={"memory": config.memory.model_copy(update={"zero_copy": "off"})})


def _generator(
    config: Config,
    path: str,
    inputs: Inputs,
    world: World,
    plan: planning.MemoryPlan,
    shared: SharedWeights | None,
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
        max_model_len=inputs.longest_prompt + rollout.max_response_tokens + 1,  # for the one of a proof
        max_num_seqs=generation.max_batch,
        seed=config.seed,
        kv_cache_bytes=plan.kv_cache_bytes,
        sleep=plan.sleep,
        tensor_parallel=generation.tensor_parallel,
        shared=shared,
    )
