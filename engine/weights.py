"""Weights out of DeepSpeed: whole tensors, in buckets, for the sampler and for export."""

from __future__ import annotations

from collections.abc import Iterator

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

BUCKET_BYTES = 256 * 2**20


def full_weights(engine: DeepSpeedEngine, prefix: str = "model.") -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter of ``engine.module.model`` by its Hugging Face name, whole, a tied one once.

    Under ZeRO-3 a bucket is gathered, yielded and released: tensors are valid until the next one is taken, and every
    rank must consume the iterator to its end.
    """
    bucket: list[tuple[str, torch.nn.Parameter]] = []
    size = 0
    for name, parameter in engine.module.named_parameters():
        bucket.append((name.removeprefix(prefix), parameter))
        size += getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()
        if size >= BUCKET_BYTES:
            yield from _whole(bucket)
            bucket, size = [], 0
    yield from _whole(bucket)


def _whole(bucket: list[tuple[str, torch.nn.Parameter]]) -> Iterator[tuple[str, torch.Tensor]]:
    sharded = [parameter for _, parameter in bucket if hasattr(parameter, "ds_id")]
    with deepspeed.zero.GatheredParameters(sharded, enabled=bool(sharded)):
        for name, parameter in bucket:
            yield name, parameter.detach()


def export(engine: DeepSpeedEngine, folder: str, write: bool) -> None:
    """Saves ``engine.module.model`` as a Hugging Face folder; every rank gathers, ``write`` says who saves."""
    state = {name: tensor.clone().cpu() for name, tensor in full_weights(engine) if write}
    if write:
        engine.module.model.save_pretrained(folder, state_dict=state)
