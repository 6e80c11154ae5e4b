"""The parts of the memory plan: what each model, pass and cache takes in each phase, under each arrangement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from engine import footprint, launch, model_shape
from engine.config import Config, ConfigError
from engine.footprint import GIB
from engine.model_shape import ModelShape

Sleep = Literal["none", "kv", "level1", "level2"]
Parts = dict[str, int]
"""Bytes on one GPU, by what they hold."""

RESERVE = 0.05
"""Share of a GPU that the plan leaves free."""
USEFUL_KV_SHARE = 0.2
"""A KV cache of this share of a GPU is useful, even if not every sequence fits at a time."""
SHARED_KINDS = ("llama", "mistral", "qwen2", "qwen3")
"""Models whose weights trainer and sampler can share."""
VOCABULARY_MULTIPLE = 64
"""vLLM pads a vocabulary to a multiple of this; a padded embedding is not the trainer's."""
FUSED_KINDS = ("llama", "mistral", "qwen2", "qwen3")
"""``engine.training.liger.ARCHITECTURES``, without importing torch."""
ADVICE = {
    "activations": "lower train.tokens_per_microbatch or set model.gradient_checkpointing true",
    "loss head": "lower train.workspace_gib or train.tokens_per_microbatch",
    "KV cache": "lower memory.kv_cache_gib, generation.max_batch or rollout.max_response_tokens",
    "vLLM weights": "raise generation.tensor_parallel or leave memory.sleep at auto",
}
"""What to change for the largest part of what does not fit."""
OTHER_ADVICE = "raise train.zero_stage, use more GPUs or take a smaller model"


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Who makes room, and what follows from that."""

    sleep: Sleep
    offload: bool
    generate: Parts
    train: Parts
    kv_cache: int
    """Bytes."""
    host: int
    """Bytes of pinned host memory."""


@dataclass(frozen=True)
class Budget:
    """What no arrangement changes."""

    config: Config
    gpu_bytes: int
    engines: dict[str, footprint.Engine]
    """Trained models."""
    always: Parts
    """In both phases."""
    training: Parts
    """Only while training, at its fullest moment."""
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
    def of(cls, config: Config, world_size: int, gpu_bytes: int) -> Budget:
        rollout, generation, memory = config.rollout, config.generation, config.memory
        item, stage, parallel = footprint.item_bytes(config), config.train.zero_stage, generation.tensor_parallel
        policy = _policy_shape(config)
        if policy.heads % parallel:
            raise ConfigError(
                f"generation.tensor_parallel ({parallel}) must divide the model's {policy.heads} attention heads"
            )
        vllm = generation.backend == "vllm"
        models = {"policy": (policy, policy.policy)}
        if config.algo == "ppo":
            path = config.model.value_path
            shape = model_shape.read("model.value_path", path) if path else policy
            models["value"] = (shape, shape.value)
        engines = {
            name: footprint.Engine(count, shape.embedding, item, stage, world_size)
            for name, (shape, count) in models.items()
        }
        always = {f"{name} weights": engine.weights for name, engine in engines.items()}
        if config.has_reference:
            path = config.model.reference_path
            frozen = (model_shape.read("model.reference_path", path) if path else policy).policy
            sharded = footprint.Engine(frozen, policy.embedding, item, 3 if stage == 3 else 0, world_size)
            always["reference weights"] = sharded.weights
        always["CUDA and libraries"] = footprint.PROCESS_BYTES
        if world_size > 1:
            always["NCCL"] = footprint.NCCL_BYTES
        longest = rollout.max_prompt_tokens + rollout.max_response_tokens
        sequences = min(generation.max_batch, config.episodes_per_step * parallel // world_size)
        if vllm:
            always["vLLM buffers, CUDA graphs"] = footprint.VLLM_BYTES + footprint.GRAPH_BYTES_PER_LAYER * policy.layers
        wanted = footprint.kv_bytes(policy, item, parallel, sequences, longest)
        useful = min(wanted, int(USEFUL_KV_SHARE * gpu_bytes))
        least = footprint.kv_bytes(policy, item, parallel, 1, longest)
        if memory.kv_cache_gib:
            useful = least = int(memory.kv_cache_gib * GIB)
        zero_copy = (
            vllm
            and memory.zero_copy == "auto"
            and memory.sleep in ("auto", "none", "kv")
            and stage < 3
            and parallel == 1
            and config.model.dtype == "bfloat16"
            and policy.kind in SHARED_KINDS
            and policy.vocabulary % VOCABULARY_MULTIPLE == 0
        )
        return cls(
            config=config,
            gpu_bytes=gpu_bytes,
            engines=engines,
            always=always,
            training=_training(config, models, engines, world_size),
            sampling=footprint.vllm_activations(policy, item, parallel, sequences, rollout.max_prompt_tokens),
            sampler_weights=0 if zero_copy else item * -(-policy.policy // parallel),
            zero_copy=zero_copy,
            wanted_kv=useful if memory.kv_cache_gib else wanted,
            useful_kv=useful,
            least_kv=least,
            block=footprint.VLLM_BLOCK * footprint.kv_bytes_per_token(policy, item, parallel),
        )

    def arrangements(self) -> Iterator[tuple[bool, Sleep]]:
        """What may be tried, cheapest first."""
        memory = self.config.memory
        levels: tuple[Sleep, ...] = ("none", "kv") if self.zero_copy else ("none", "kv", "level2")
        if self.config.generation.backend != "vllm":
            levels = ("none",)
        elif memory.sleep != "auto":
            levels = (memory.sleep,)
        for offload in {"auto": (False, True), "on": (True,), "off": (False,)}[memory.offload]:
            for sleep in levels:
                yield offload, sleep

    def arranged(self, sleep: Sleep, offload: bool) -> Arrangement:
        """The phases under an arrangement, with as much KV cache as fits, but no more than can be used."""
        vllm = self.config.generation.backend == "vllm"
        states = {f"{name} fp32 and AdamW": engine.states for name, engine in self.engines.items()}
        buffers = {"ZeRO-3 buffers": sum(engine.buffers for engine in self.engines.values())}
        weights = {"vLLM weights" if vllm else "sampler's weights": self.sampler_weights}
        generate = self.always | ({} if offload else states | buffers) | weights | {"sampling": self.sampling}
        train = self.always | states | buffers | (weights if sleep in ("none", "kv") else {}) | self.training
        awake = vllm and sleep == "none"  # the KV cache stays while training
        train_room = self.capacity - sum(train.values())
        room = self.capacity - sum(generate.values())
        room = min(room, train_room) if awake else room if train_room >= 0 else 0
        cache = max(0, min(room, self.wanted_kv) // self.block * self.block)
        generate["KV cache"] = cache
        if awake:
            train["KV cache"] = cache
        host = (sum(states.values()) if offload else 0) + (self.sampler_weights if sleep == "level1" else 0)
        generate, train = ({name: size for name, size in parts.items() if size} for parts in (generate, train))
        return Arrangement(sleep, offload, generate, train, cache, host)

    @property
    def capacity(self) -> int:
        """Bytes of a GPU that may be planned with."""
        return int((1 - RESERVE) * self.gpu_bytes)

    def choose(self) -> Arrangement:
        """The cheapest arrangement with a useful KV cache, or else the one with the largest.

        Raises:
            ConfigError: training does not fit, or generating does not with a KV cache for one sequence.
        """
        tried = []
        for offload, sleep in self.arrangements():
            tried.append(self.arranged(sleep, offload))
            if tried[-1].kv_cache >= self.useful_kv // self.block * self.block:
                return tried[-1]
        best = max(tried, key=lambda one: one.kv_cache)
        if best.kv_cache < self.least_kv // self.block * self.block:
            self._refuse(tried[-1])
        return best

    def _refuse(self, last: Arrangement) -> None:
        """Says what is missing where the most has made room."""
        least = last.generate | {"KV cache": self.least_kv}
        for name, parts in (("training", last.train), ("generating", least)):
            missing = sum(parts.values()) - self.capacity
            if missing > 0:
                largest = max(parts, key=lambda part: parts[part])
                raise ConfigError(
                    f"the GPU is too small: {name} needs {gib(missing + self.capacity)} GiB, {gib(missing)} GiB more "
                    f"than the {gib(self.capacity)} GiB there are for it; the largest part is '{largest}' with "
                    f"{gib(parts[largest])} GiB: {ADVICE.get(largest, OTHER_ADVICE)}"
                )


def gib(size: int) -> str:
    """Bytes as a person reads them, in GiB."""
    return f"{size / GIB:.2f}"


def _policy_shape(config: Config) -> ModelShape:
    if config.model.path is not None:
        return model_shape.read("model.path", config.model.path)
    from engine.tasks import addition

    return model_shape.from_config(addition.model_config().to_dict())


def _training(
    config: Config,
    models: dict[str, tuple[ModelShape, int]],
    engines: dict[str, footprint.Engine],
    world_size: int,
) -> dict[str, int]:
    """The transient parts of training at its fullest moment: in a backward pass, or in an optimizer step.

    In each minibatch every microbatch passes through the policy, then through the value model; then both step.
    """
    train, rollout = config.train, config.rollout
    episodes = config.episodes_per_step // world_size // train.minibatches_per_batch
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    tokens = min(train.tokens_per_microbatch, episodes * longest)
    several = episodes * longest > train.tokens_per_microbatch
    names = list(engines)
    moments = []
    for place, (name, engine) in enumerate(engines.items()):
        shape = models[name][0]
        one = footprint.Pass(shape, tokens, engine.item, config.model.gradient_checkpointing, _fused(shape))
        before = names if several else names[:place]
        gradients = sum(engines[other].accumulated for other in before)
        head = kept = 0
        if name == "policy":
            head = one.head(train.workspace_gib * GIB, train.entropy_coef != 0)
            kept = one.head_gradient if shape.tied else 0
        moments += [
            {
                "gathered weights": engine.gathered,
                "gradients": gradients,
                "activations": one.activations,
                "loss head": head,
            },
            {
                "gathered weights": engine.gathered,
                "gradients": gradients + engine.in_flight,
                "activations": one.activations + one.backward,
                "loss head": kept,
            },
            {"gradients": engine.step + sum(engines[other].accumulated for other in names[place + 1 :])},
        ]
    fullest = max(moments, key=lambda moment: sum(moment.values()))
    fullest["allocator"] = int(footprint.ALLOCATOR_SHARE * sum(fullest.values()))
    return fullest


def _fused(shape: ModelShape) -> bool:
    """Whether Liger's kernels will run; a plan made where no GPU is takes them for installed where one is."""
    return shape.kind in FUSED_KINDS and (find_spec("liger_kernel") is not None or launch.visible_gpus() == 0)
