"""The memory plan: what lives on each GPU while generating and while training, and what has to make room for what.

Made from the configuration and the model's sizes before anything loads. It prefers the cheapest arrangement that leaves
the sampler a useful KV cache: nothing sleeps; the KV cache; vLLM's weights too (level 2); then these with activations
recomputed in the backward pass; and all of it again with the optimizer states in host memory while generating. With
generation one batch ahead on the same GPUs everything is awake at once. A split run has a plan for each side; there and
one batch ahead nothing sleeps or is shared.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass, field

from engine.config import Config, ConfigError
from engine.memory.arrangements import Budget, Parts, Side, Sleep, takes_turns
from engine.memory.units import GIB, gib


@dataclass(frozen=True)
class Phase:
    """Predicted bytes on one GPU when a phase is at its fullest."""

    parts: Parts

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryPlan:
    """What was decided, and the bytes it was decided by. Without a GPU there are no phases."""

    sleep: Sleep
    """What vLLM gives up while training. With ``zero_copy`` its weights are the trainer's and always awake."""
    offload: bool
    """Optimizer states and fp32 weights are in host memory while generating."""
    zero_copy: bool
    """Trainer and sampler share one storage for the weights."""
    kv_cache_bytes: int
    """On each rank."""
    phases: dict[str, Phase] = field(default_factory=dict)
    """``generate`` and ``train``; ``train`` alone where both happen at once, or on GPUs that only train; ``generate``
    alone on those that only generate."""
    gpu_bytes: int = 0
    wanted_kv_bytes: int = 0
    """KV cache with room for every sequence that may be sampled at a time."""
    host_bytes: int = 0
    """Host memory of one rank for what leaves the GPU or never comes there."""
    checkpointing: bool = False
    """Training recomputes each layer's activations in the backward pass."""
    setting: str = ""
    """The run's terms that decide, for the table's head."""

    def errors(self, measured: dict[str, int]) -> dict[str, float]:
        """Metrics ``memory/plan_error_<phase>``: measured peak over planned total, minus 1, for the planned phases."""
        return {
            f"memory/plan_error_{name}": measured[name] / phase.total - 1
            for name, phase in self.phases.items()
            if name in measured
        }

    def table(self) -> str:
        """The plan for a person: GiB by part and phase, the decision, and the reason for it."""
        if not self.phases:
            return f"memory   no GPU: KV cache of {gib(self.kv_cache_bytes)} GiB a rank if vLLM samples"
        names = list(dict.fromkeys(part for phase in self.phases.values() for part in phase.parts))
        lines = [f"memory   GiB on each GPU of {gib(self.gpu_bytes)}, predicted; {self.setting}"]
        width = max(26, *map(len, names))
        lines.append(f"  {'':{width}}" + "".join(f"{name:>10}" for name in self.phases))
        for name in names:
            cells = (phase.parts.get(name, 0) for phase in self.phases.values())
            lines.append(f"  {name:{width}}" + "".join(f"{gib(cell) if cell else '-':>10}" for cell in cells))
        for name, values in (
            ("total", [phase.total for phase in self.phases.values()]),
            ("free", [self.gpu_bytes - phase.total for phase in self.phases.values()]),
        ):
            lines.append(f"  {name:{width}}" + "".join(f"{gib(value):>10}" for value in values))
        if self.host_bytes:
            lines.append(f"  host memory of a rank: {gib(self.host_bytes)} GiB")
        return "\n".join([*lines, f"  decision: {self.decision}"])

    @property
    def decision(self) -> str:
        """One line: who makes room, and how much of the KV cache that could be used there is."""
        sleeps = {
            "none": "nothing sleeps",
            "kv": "the KV cache sleeps while training",
            "level1": "vLLM sleeps while training, its weights in host memory (level 1)",
            "level2": "vLLM sleeps while training, its weights dropped (level 2)",
        }[self.sleep]
        recomputed = ["activations recomputed in the backward pass"] if self.checkpointing else []
        if "generate" not in self.phases and not self.wanted_kv_bytes:
            return "; ".join([f"only training here: {sleeps}", *recomputed])
        if "train" not in self.phases:
            sleeps = f"only generation here: {sleeps}"
        elif "generate" not in self.phases:
            sleeps = f"generation and training at the same time: {sleeps}, the sampler has weights of its own"
        shared = ["one copy of the weights for trainer and sampler"] if self.zero_copy else []
        offload = ["optimizer states in host memory while generating"] if self.offload else []
        share = min(1.0, self.kv_cache_bytes / max(1, self.wanted_kv_bytes))
        cache = f"KV cache {gib(self.kv_cache_bytes)} GiB, {share:.0%} of what all sequences at a time take"
        return "; ".join([*shared, sleeps, *offload, *recomputed, cache])


def gpu_bytes(config: Config) -> int:
    """Bytes of the smallest GPU this process may see, less what the driver keeps; at most ``memory.gpu_gib``.

    Asks the driver's own tool, so that no CUDA context comes to be.

    Raises:
        ConfigError: the tool does not answer and ``memory.gpu_gib`` is not set.
    """
    limit = config.memory.gpu_gib and int(config.memory.gpu_gib * GIB)
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    command = ["nvidia-smi", "--query-gpu=memory.total,memory.reserved", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            [*command, *(["-i", chosen] if chosen else [])], capture_output=True, text=True, check=True, timeout=60
        ).stdout
        rows = [[int(number) for number in line.split(",")] for line in answer.strip().splitlines()]
        smallest = min(total - reserved for total, reserved in rows) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        if limit:
            return limit
        raise ConfigError(f"nvidia-smi does not tell the GPUs' memory ({error}): set memory.gpu_gib") from None
    return min(smallest, limit or smallest)


def plans(config: Config, world_size: int, gpu_bytes: int) -> dict[Side, MemoryPlan]:
    """The plans of a run, as ``plan`` makes them: for the ranks that train, and for those that only generate."""
    sides: tuple[Side, ...] = ("train", "generate") if config.generating_ranks else ("train",)
    return {side: plan(config, world_size, gpu_bytes, side) for side in sides}


def plan(config: Config, world_size: int, gpu_bytes: int, side: Side = "train") -> MemoryPlan:
    """Predicts each phase and decides.

    Args:
        world_size: ranks of the whole run, one a GPU.
        gpu_bytes: of each GPU; 0 for a run on the CPU, where nothing is predicted.
        side: ``generate`` for the ranks of a split run that generate.

    Raises:
        ConfigError: it does not fit whatever sleeps: names the phase, the missing bytes, the largest part and what to
            change; or PyTorch's allocator is set up in a way that keeps vLLM's memory from being freed.
    """
    memory = config.memory
    if gpu_bytes == 0:
        turns = takes_turns(config)
        sleep: Sleep = "none" if memory.sleep == "auto" or not turns else memory.sleep
        cache, checkpointing = int((memory.kv_cache_gib or 1.0) * GIB), bool(config.model.gradient_checkpointing)
        return MemoryPlan(sleep, turns and memory.offload == "on", False, cache, checkpointing=checkpointing)
    budget = Budget.of(config, world_size, gpu_bytes, side)
    best = budget.choose()
    if config.generation.backend == "vllm" and best.sleep != "none":
        _refuse_expandable_segments()
    return MemoryPlan(
        best.sleep,
        best.offload,
        budget.zero_copy,
        best.kv_cache,
        {name: Phase(parts) for name, parts in best.phases.items()},
        gpu_bytes,
        budget.wanted_kv,
        best.host,
        best.checkpointing,
        _setting(config, world_size, side),
    )


def check_host(config: Config, plan: MemoryPlan, ranks: int) -> None:
    """Raises ``ConfigError`` where this machine's memory cannot hold the optimizers of ``ranks`` ranks on it."""
    there, needed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), ranks * plan.host_bytes
    if config.train.optimizer_offload == "cpu" and needed > there:
        raise ConfigError(
            f"train.optimizer_offload cpu needs {gib(needed)} GiB of host memory, and this machine has {gib(there)} "
            "GiB: use more GPUs or lora.rank instead, or take a smaller model"
        )


def _setting(config: Config, world_size: int, side: Side) -> str:
    generators = config.generating_ranks
    ranks = generators if side == "generate" else world_size - generators
    who = f"{ranks} rank{'s' if ranks > 1 else ''}"
    if generators:
        who += f" that {side}{'' if ranks > 1 else 's'}"
    if side == "generate":
        return f"{who}, tensor parallel {config.generation.tensor_parallel}, {config.model.dtype}"
    optimizer = ", optimizer on the CPU" if config.train.optimizer_offload == "cpu" else ""
    return f"{who}, ZeRO-{config.train.zero_stage}{optimizer}, {config.model.dtype}"


def _refuse_expandable_segments() -> None:
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if re.search(r"expandable_segments\s*:\s*true", os.environ.get(variable, ""), re.IGNORECASE):
            raise ConfigError(
                f"{variable} has expandable_segments:True, with which a sleeping vLLM may free no memory: take it out "
                "(training gets such segments by itself, once vLLM is built), or set memory.sleep none"
            )
