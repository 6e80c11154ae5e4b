"""Weights out of DeepSpeed: whole tensors, in buckets, for the sampler and for export."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from engine.training import lora

BUCKET_BYTES = 256 * 2**20


def full_weights(engine: DeepSpeedEngine, prefix: str = "model.") -> Iterator[tuple[str, Tensor]]:
    """Every parameter of ``engine.module.model`` by its Hugging Face name, whole, a tied one once, in layer order.

    Without ZeRO-3 these are the parameters themselves; LoRA's adapters come merged into copies. Under ZeRO-3 each rank
    holds a part of each; a bucket is gathered in one collective, yielded and released: tensors are valid until the next
    one is taken, and every rank must consume the iterator to its end.
    """
    return module_weights(engine.module, prefix)


def module_weights(module: nn.Module, prefix: str = "model.") -> Iterator[tuple[str, Tensor]]:
    """The same of a module that need not be in an engine."""
    named = _whole(lora.factors_first(module.named_parameters()))
    for name, tensor in lora.merged(named, module):
        yield name.removeprefix(prefix), tensor


def _whole(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Parameters by the names they come with, gathered if need be."""
    bucket: list[tuple[str, Any]] = []
    size = 0
    for name, parameter in named:
        if not hasattr(parameter, "ds_tensor"):
            yield name, parameter.detach()
            continue
        if bucket and (size >= BUCKET_BYTES or parameter.ds_tensor.dtype != bucket[0][1].ds_tensor.dtype):
            yield from _gathered(bucket)
            bucket, size = [], 0
        bucket.append((name, parameter))
        size += parameter.ds_numel * parameter.ds_tensor.element_size()
    if bucket:
        yield from _gathered(bucket)


def manifest(engine: DeepSpeedEngine, prefix: str = "model.") -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Name, shape and numbers of what ``full_weights`` yields, in its order; gathers nothing."""
    return [
        (
            lora.base_name(name).removeprefix(prefix),
            tuple(getattr(parameter, "ds_shape", parameter.shape)),
            parameter.dtype,
        )
        for name, parameter in engine.module.named_parameters()
        if not lora.FACTOR.search(name)
    ]


def _gathered(bucket: list[tuple[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Joins the ranks' parts, which are equally long on all of them: the last ones are padded.

    DeepSpeed's own gathering takes a collective and a good deal of bookkeeping for each parameter.
    """
    parts = [parameter.ds_tensor.flatten() for _, parameter in bucket]
    mine, group = torch.cat(parts), bucket[0][1].ds_process_group
    everyones = mine.new_empty(dist.get_world_size(group), len(mine))
    dist.all_gather_into_tensor(everyones.view(-1), mine, group=group)
    columns = everyones.split([len(part) for part in parts], dim=1)
    for (name, parameter), column in zip(bucket, columns, strict=True):
        yield name, column.flatten()[: parameter.ds_numel].view(parameter.ds_shape)


def lora_factors(engine: DeepSpeedEngine) -> Iterator[tuple[str, Tensor]]:
    """What LoRA trains, by its names in ``engine.module.model``, whole: the matrices of adapters, and a reward model's
    head. Nothing without adapters. Every rank must consume all."""
    return module_factors(engine.module.model)


def module_factors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The same of a model that need not be in an engine."""
    named = [pair for pair in model.named_parameters() if pair[1].requires_grad]
    return _whole(named if any(lora.FACTOR.search(name) for name, _ in named) else [])
