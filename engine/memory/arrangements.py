"""The arrangements that a memory plan chooses from: what each model, pass and cache takes in each phase under each.

Sampler and trainer take turns on a GPU, are awake on it at once, or have GPUs of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from engine.config import Config, ConfigError
from engine.memory import kv_cache, model_shape, sampler_bytes, training_bytes
from engine.memory.model_shape import ModelShape
from engine.memory.units import GIB, gib
from engine.models import vocabulary
from engine.models.kinds import LLAMA_LIKE, WHOLE_LAYERS

Sleep = Literal["none", "kv", "level1", "level2"]
Side = Literal["train", "generate"]
"""``train``: the ranks that train and, unless others generate, sample too. ``generate``: those that only generate."""
Parts = dict[str, int]
"""Bytes on one GPU, by what they hold."""

RESERVE = 0.05
"""Share of a GPU that the plan leaves free."""
USEFUL_KV_SHARE = 0.2
"""A KV cache of this share of a GPU is useful, even if not every sequence fits at a time."""
VOCABULARY_MULTIPLE = 64
"""vLLM pads a vocabulary to a multiple of this; a padded embedding is not the trainer's."""
ADVICE = {
    "activations": "lower train.tokens_per_microbatch",
    "loss head": "lower train.workspace_gib or train.tokens_per_microbatch",
    "KV cache": "lower memory.kv_cache_gib, generation.max_batch or rollout.max_response_tokens",
    "vLLM weights": "raise generation.tensor_parallel or leave memory.sleep at auto",
}
"""What to change for the largest part of what does not fit."""
OTHER_ADVICE = "raise train.zero_stage, use more GPUs or take a smaller model"
GENERATOR_ADVICE = "raise schedule.generators and generation.tensor_parallel, or lower generation.max_batch"


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Who makes room, and what follows from that."""

    sleep: Sleep
    offload: bool
    checkpointing: bool
    """Activations are computed again in the backward pass."""
    phases: dict[str, Parts]
    """``generate`` and ``train``; one alone where sampler and trainer do not take turns."""
    kv_cache: int
    """Bytes."""
    host: int
    """Bytes of host memory of one rank."""


@dataclass(frozen=True)
class Budget:
    """What no arrangement changes."""

    config: Config
    side: Side
    world_size: int
    """Ranks of the whole run."""
    samples: bool
    """A sampler lives on these GPUs."""
    gpu_bytes: int
    engines: dict[str, training_bytes.Engine]
    """Trained models."""
    always: Parts
    """In both phases."""
    training: dict[bool, Parts]
    """Only while training, at its fullest moment: without and with gradient checkpointing."""
    recomputing: tuple[bool, ...]
    """Which of these may be, the faster one first."""
    sampling: int
    """Bytes only while generating, KV cache apart."""
    sampler_weights: int
    """Bytes of the sampler's own copy."""
    zero_copy: bool
    wanted_kv: int
    """Bytes for every sequence that may be sampled at a time."""
    useful_kv: int
    least_kv: int
    """Bytes for one sequence."""
    block: int
    """Bytes of a block of the KV cache."""

    @classmethod
    def of(cls, config: Config, world_size: int, gpu_bytes: int, side: Side) -> Budget:
        rollout, generation, memory = config.rollout, config.generation, config.memory
        item, stage, parallel = training_bytes.item_bytes(config), config.train.zero_stage, generation.tensor_parallel
        ranks = config.generating_ranks if side == "generate" else world_size - config.generating_ranks
        chosen = config.model.gradient_checkpointing
        policy = _policy_shape(config)
        if policy.heads % parallel:
            raise ConfigError(
                f"generation.tensor_parallel ({parallel}) must divide the model's {policy.heads} attention heads"
            )
        vllm = generation.backend == "vllm"
        samples = side == "generate" or (config.generating_ranks == 0 and not config.trains_on_rows)
        models = _trained(config, policy) if side == "train" else {}
        adapters = _adapters(config, policy)
        engines = {
            name: training_bytes.Engine(
                count,
                shape.embedding,
                item,
                stage,
                ranks,
                adapters=adapters.get(name, 0),
                layer=shape.layer if shape.kind in WHOLE_LAYERS else 0,
                on_host=config.train.optimizer_offload == "cpu",
            )
            for name, (shape, count) in models.items()
        }
        always = {f"{_words(name)} weights": engine.weights for name, engine in engines.items()}
        if side == "train":
            for name, count in _frozen(config, policy).items():
                sharded = training_bytes.Engine(count, policy.embedding, item, 3 if stage == 3 else 0, ranks)
                always[name] = sharded.weights
        always["CUDA and libraries"] = training_bytes.PROCESS_BYTES
        if world_size > 1:
            always["NCCL"] = training_bytes.NCCL_BYTES
        longest = config.longest_sequence
        sequences = min(generation.max_batch, config.episodes_per_step * parallel // ranks)
        if vllm and samples:
            always["vLLM buffers, CUDA graphs"] = sampler_bytes.always(policy)
        wanted = kv_cache.size(policy, item, parallel, sequences, longest)
        useful = min(wanted, int(USEFUL_KV_SHARE * gpu_bytes))
        least = kv_cache.size(policy, item, parallel, 1, longest)
        if memory.kv_cache_gib:
            wanted = useful = least = int(memory.kv_cache_gib * GIB)
        zero_copy = (
            vllm
            and takes_turns(config)
            and not adapters
            and memory.zero_copy == "auto"
            and memory.sleep in ("auto", "none", "kv")
            and stage < 3
            and parallel == 1
            and config.model.dtype == "bfloat16"
            and policy.kind in LLAMA_LIKE
            and policy.vocabulary % VOCABULARY_MULTIPLE == 0
        )
        sampling = sampler_bytes.activations(policy, item, parallel, sequences, rollout.max_prompt_tokens)
        if side == "generate":  # between two batches the trainer's tensors arrive, one at a time
            sampling = max(sampling, item * policy.embedding)
        elif adapters:  # and here adapters are merged, a layer at a time, in fp32
            sampling = max(sampling, (8 + item) * policy.hidden * policy.intermediate)
        return cls(
            config=config,
            side=side,
            world_size=world_size,
            samples=samples,
            gpu_bytes=gpu_bytes,
            engines=engines,
            always=always,
            training={
                checkpointing: training_bytes.training(config, models, engines, ranks, checkpointing) if engines else {}
                for checkpointing in (False, True)
            },
            recomputing=(False,) if not engines else (False, True) if chosen is None else (chosen,),
            sampling=sampling if samples else 0,
            sampler_weights=item * -(-policy.policy // parallel) if samples and not zero_copy else 0,
            zero_copy=zero_copy,
            wanted_kv=wanted if samples else 0,
            useful_kv=useful if samples else 0,
            least_kv=least if samples else 0,
            block=kv_cache.block_bytes(policy, item, parallel),
        )

    def arrangements(self) -> Iterator[tuple[Sleep, bool, bool]]:
        """What may be tried, cheapest first: who sleeps, whether states are offloaded, and activations recomputed."""
        memory = self.config.memory
        if not takes_turns(self.config):
            for checkpointing in self.recomputing:
                yield "none", False, checkpointing
            return
        levels: tuple[Sleep, ...] = ("none", "kv") if self.zero_copy else ("none", "kv", "level2")
        if self.config.generation.backend != "vllm":
            levels = ("none",)
        elif memory.sleep != "auto":
            levels = (memory.sleep,)
        moved = "off" if self.config.train.optimizer_offload == "cpu" else memory.offload
        for offload in {"auto": (False, True), "on": (True,), "off": (False,)}[moved]:
            for checkpointing in self.recomputing:
                for sleep in levels:
                    yield sleep, offload, checkpointing

    def arranged(self, sleep: Sleep, offload: bool, checkpointing: bool, cache: int | None = None) -> Arrangement:
        """The phases under an arrangement, with this KV cache or as much as fits, but no more than can be used."""
        vllm = self.config.generation.backend == "vllm"
        states = {f"{_words(name)} fp32 and AdamW": engine.states for name, engine in self.engines.items()}
        buffers = sum(engine.buffers for engine in self.engines.values())
        trainer = states | {f"ZeRO-{self.config.train.zero_stage} buffers": buffers}
        weights = {"vLLM weights" if vllm else "sampler's weights": self.sampler_weights}
        sampling, training = {"sampling": self.sampling}, self.training[checkpointing]
        if takes_turns(self.config):
            phases = {
                "generate": self.always | ({} if offload else trainer) | weights | sampling,
                "train": self.always | trainer | (weights if sleep in ("none", "kv") else {}) | training,
            }
            holders = ("generate", "train") if vllm and sleep == "none" else ("generate",)
        else:
            phases = {self.side: self.always | trainer | weights | sampling | training}
            holders = (self.side,)
        if cache is None:
            rooms = {name: self.capacity - sum(parts.values()) for name, parts in phases.items()}
            room = min(rooms[name] for name in holders) if min(rooms.values()) >= 0 else 0
            cache = min(room, self.wanted_kv) // self.block * self.block
        for name in holders:
            phases[name]["KV cache"] = cache
        host = (sum(states.values()) if offload else 0) + (self.sampler_weights if sleep == "level1" else 0)
        host += sum(engine.host for engine in self.engines.values())
        there = {name: {part: size for part, size in parts.items() if size} for name, parts in phases.items()}
        return Arrangement(sleep, offload, checkpointing, there, cache, host)

    @property
    def capacity(self) -> int:
        """Bytes of a GPU that may be planned with."""
        return int((1 - RESERVE) * self.gpu_bytes)

    @property
    def at_once(self) -> bool:
        """Sampler and trainer share these GPUs and do not take turns."""
        return self.samples and self.side == "train" and not takes_turns(self.config)

    def choose(self) -> Arrangement:
        """The cheapest arrangement with a useful KV cache, or else the one with the largest.

        Raises:
            ConfigError: training does not fit, or generating does not with a KV cache for one sequence; or both at once
                do not with a useful one.
        """
        tried = []
        for arrangement in self.arrangements():
            tried.append(self.arranged(*arrangement))
            if self._fits(tried[-1], self.useful_kv):
                return tried[-1]
        best = max(tried, key=lambda one: one.kv_cache)
        if not self._fits(best, self._enough_kv):
            last = tried[-1]
            recomputed = (self.arranged(one.sleep, one.offload, True) for one in tried)
            helps = not last.checkpointing and any(self._fits(one, self._enough_kv) for one in recomputed)
            self._refuse(self.arranged(last.sleep, last.offload, last.checkpointing, self._enough_kv), helps)
        return best

    @property
    def _enough_kv(self) -> int:
        """Bytes of the KV cache without which nothing is arranged."""
        return self.useful_kv if self.at_once else self.least_kv

    def _fits(self, one: Arrangement, cache: int) -> bool:
        fullest = max(sum(parts.values()) for parts in one.phases.values())
        return fullest <= self.capacity and one.kv_cache >= cache // self.block * self.block

    def _refuse(self, least: Arrangement, recomputing_helps: bool) -> None:
        """Says what is missing where the most has made room, with the least KV cache that would do."""
        for phase, parts in reversed(least.phases.items()):
            needed = sum(parts.values())
            missing = needed - self.capacity
            if missing <= 0:
                continue
            largest = max(parts, key=lambda part: parts[part])
            advice = f"the largest part is '{largest}' with {gib(parts[largest])} GiB: {self._advice(largest)}"
            if recomputing_helps:
                advice += "; or set model.gradient_checkpointing true"
            if self._fits_with_optimizer_offload():
                stage = " with train.zero_stage 2" if self.config.train.zero_stage < 2 else ""
                advice += f"; or set train.optimizer_offload cpu{stage}"
            what = {"train": "training", "generate": "generating"}[phase]
            if self.at_once:
                what = "schedule.staleness 1 on the same GPUs has sampler and trainer awake at once and"
                advice += "; or take schedule.placement split or schedule.staleness 0"
            raise ConfigError(
                f"the GPU is too small: {what} needs {gib(needed)} GiB, {gib(missing)} GiB more than the "
                f"{gib(self.capacity)} GiB there are for it; {advice}"
            )

    def _fits_with_optimizer_offload(self) -> bool:
        """True where ``train.optimizer_offload`` is not set and would help."""
        train = self.config.train
        if self.side == "generate" or train.optimizer_offload == "cpu" or self.config.model.dtype == "float16":
            return False
        changed = train.model_copy(update={"optimizer_offload": "cpu", "zero_stage": max(2, train.zero_stage)})
        config = self.config.model_copy(update={"train": changed})
        other = Budget.of(config, self.world_size, self.gpu_bytes, self.side)
        return any(other._fits(other.arranged(*one), other._enough_kv) for one in other.arrangements())

    def _advice(self, part: str) -> str:
        """What makes a part smaller."""
        if self.side == "generate" and part != "KV cache":
            return GENERATOR_ADVICE
        if self.at_once and part == "vLLM weights":  # it neither sleeps then nor is split over ranks
            return OTHER_ADVICE
        return ADVICE.get(part, OTHER_ADVICE)


def takes_turns(config: Config) -> bool:
    """True where sampler and trainer use the same GPUs one after the other, so that one can make room for the other."""
    return config.generating_ranks == 0 and config.schedule.staleness == 0 and not config.trains_on_rows


def _policy_shape(config: Config) -> ModelShape:
    if config.model.path is not None:
        shape = model_shape.read("model.path", config.model.path)
        if not config.data.changes_tokenizer:
            return shape
        # At most: which of them the tokenizer knows already, or has rows to spare for, shows when it is read.
        new = len(config.data.new_special_tokens) + 1
        return shape.with_vocabulary(vocabulary.grown(shape.vocabulary, shape.vocabulary + new))
    from engine.tasks import addition

    return model_shape.from_config(addition.model_config().to_dict())


def _words(name: str) -> str:
    return name.replace("_", " ")


def _trained(config: Config, policy: ModelShape) -> dict[str, tuple[ModelShape, int]]:
    """Shape and parameters of the trained models."""
    scores = config.trained == "reward_model"
    models: dict[str, tuple[ModelShape, int]] = {config.trained: (policy, policy.value if scores else policy.policy)}
    if config.algorithm.value_model:
        path = config.model.value_path
        shape = model_shape.read("model.value_path", path) if path else policy
        models["value"] = (shape, shape.value)
    return models


def _adapters(config: Config, policy: ModelShape) -> dict[str, int]:
    """Parameters that LoRA trains of a model; beside all layers, should some have no adapter. Nothing without LoRA."""
    if not config.lora.rank:
        return {}
    head = policy.hidden if config.trained == "reward_model" else 0
    return {config.trained: policy.adapters(config.lora.rank) + head}


def _frozen(config: Config, policy: ModelShape) -> dict[str, int]:
    """Parameters of the models that only forward passes read, by the names of their parts."""
    frozen = {}
    if config.loads_reference:
        path = config.model.reference_path
        frozen["reference weights"] = (model_shape.read("model.reference_path", path) if path else policy).policy
    if config.reward.model:
        frozen["reward model"] = model_shape.read("reward.model", config.reward.model).value
    return frozen
