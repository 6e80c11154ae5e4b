"""The residual stream of one model in fp32, between layers that compute in 16 bits.

What a layer adds is small beside the stream, and bf16 has eight bits. Plain layers and Liger's round every sum and norm
the rounded one, and rotate queries and keys in 16 bits with three roundings. vLLM's fused kernels norm a sum before it
is rounded, and rotate in fp32 by a table of cosines and sines in 16 bits. Here no sum is rounded, and the rotation is
vLLM's; docs/colocation.md has what each is worth.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import kernels
from engine.models.kinds import LLAMA_LIKE
from engine.training import liger


def patch(model: PreTrainedModel) -> bool:
    """Changes a model in 16-bit numbers in place, after ``liger.patch``; its parameters stay the same.

    Embeddings, the layers' sums and their inputs become fp32; what the linear layers, attention and the head see, and
    what they give, stays in the model's dtype. Only this model changes, and every module is still called, so that
    ZeRO-3's and peft's hooks, and gradient checkpointing, find what they did before. Queries and keys are rotated in
    fp32, by cosines and sines with the model's dtype's digits, and rounded once.

    Returns:
        True if the model was changed: it is one of ``kinds.LLAMA_LIKE``, in bf16 or fp16.
    """
    dtype = model.dtype
    if model.config.model_type not in LLAMA_LIKE or dtype not in (torch.bfloat16, torch.float16):
        return False
    backbone: Any = model.base_model
    backbone.embed_tokens.register_forward_hook(lambda module, inputs, embedded: embedded.float())
    backbone.rotary_emb.register_forward_hook(
        lambda module, inputs, tables: tuple(table.to(dtype).float() for table in tables)
    )
    for layer in backbone.layers:
        layer.forward = types.MethodType(_layer, layer)
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.forward = types.MethodType(_add_norm, norm)
        attention = layer.self_attn
        rope = attention.forward.__func__.__globals__[liger.ROPE]
        liger.give_rope(attention, functools.partial(_rounded_once, rope))
    backbone.norm.forward = types.MethodType(_norm, backbone.norm)
    return True


def _layer(self: Any, hidden_states: Tensor, **arguments: Any) -> Tensor:
    """A decoder layer: the stream, [1, N, H] fp32, to the stream."""
    stream, hidden = self.input_layernorm(hidden_states)
    attended, _ = self.self_attn(hidden_states=hidden, **arguments)
    stream, hidden = self.post_attention_layernorm(stream, attended)
    out: Tensor = stream + self.mlp(hidden)
    return out


def _add_norm(self: Any, stream: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The stream with the branch added, and its norm.

    Without a branch the stream is passed through all the same: its gradient is then summed in the norm's own kernel.
    """
    return kernels.add_rms_norm(stream, branch, self.weight, self.variance_epsilon)


def _norm(self: nn.Module, stream: Tensor) -> Tensor:
    return _add_norm(self, stream)[1]


def _rounded_once(rope: Callable[..., tuple[Tensor, Tensor]], query: Tensor, key: Tensor, *tables: Tensor) -> Any:
    """Rotated by fp32 tables. Liger's kernel rounds as it stores; transformers' function gives fp32."""
    rotated = rope(query, key, *tables)
    return tuple(new.to(old.dtype) for new, old in zip(rotated, (query, key), strict=True))
