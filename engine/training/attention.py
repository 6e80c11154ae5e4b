"""Attention over packed sequences, registered with transformers as ``packed``.

No token sees another sequence and no [N, N] mask exists. On a GPU in 16-bit numbers a variable-length kernel walks the
packed row: flash-attn's where that package is installed, else PyTorch's own. Everywhere else the row goes through
scaled-dot-product attention as one batch row a sequence. Models reach it through transformers' attention interface.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from engine.training.packing import Layout

NAME = "packed"
calls = 0
"""How often this process has called ``packed_attention``: a model that does not call it attends in its own way."""


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: Layout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each packed sequence, without dropout.

    Args:
        query: [1, heads, N, D]; key, value: [1, kv_heads, N, D].
        packed: the row's layout, handed through the model's forward.
        scaling: factor on the products of queries and keys. Default: 1 / sqrt(D).
        sliding_window: tokens that a token sees, itself included. Default: all before it.

    Returns:
        [1, N, heads, D], and no attention weights.

    Raises:
        NotImplementedError: for soft-capped attention.
    """
    global calls
    calls += 1
    if softcap is not None:
        raise NotImplementedError("packed attention computes no soft-capped attention logits (this model wants them)")
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    if has_kernel(query):
        return _varlen(q, k, v, packed, scaling, sliding_window)[None], None
    return _sdpa(q, k, v, packed, scaling, sliding_window)[None], None


def has_kernel(query: Tensor) -> bool:
    """True where a variable-length kernel takes tensors of this device, dtype and head size."""
    return query.is_cuda and query.dtype != torch.float32 and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256


def _varlen(q: Tensor, k: Tensor, v: Tensor, packed: Layout, scale: float | None, window: int | None) -> Tensor:
    """A kernel walks the row: q [N, heads, D], k and v [N, kv_heads, D] to [N, heads, D]."""
    row = (q, k, v, packed.cu_seqlens, packed.cu_seqlens, packed.longest, packed.longest)
    before = -1 if window is None else window - 1
    if (flash := _flash_attn()) is not None:
        out: Tensor = flash(*row, softmax_scale=scale, causal=True, window_size=(before, 0))
        return out
    # The operator below torch.nn.attention.varlen, whose own signature is another one in every PyTorch release.
    causal = window is None
    options = {"scale": scale, "window_size_left": before, "window_size_right": 0}
    result: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward(*row, 0.0, causal, False, **options)
    return result[0]


@functools.cache
def _flash_attn() -> Callable[..., Tensor] | None:
    """flash-attn's own kernel, where the package is installed and fits this PyTorch."""
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func  # type: ignore[no-any-return]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, packed: Layout, scale: float | None, window: int | None) -> Tensor:
    """One batch row a sequence: q [N, heads, D], k and v [N, kv_heads, D] to [N, heads, D]."""
    sequences = len(packed.cu_seqlens) - 1
    grouped = q.shape[1] != k.shape[1]
    q, k, v = (_spread(states, packed, sequences) for states in (q, k, v))
    band = None
    if window is not None and packed.longest > window:
        place = torch.arange(packed.longest, device=q.device)
        distance = place[:, None] - place
        band = (distance >= 0) & (distance < window)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=band, is_causal=band is None, scale=scale, enable_gqa=grouped
    )
    return out.transpose(1, 2).flatten(0, 1)[packed.slots]


def _spread(states: Tensor, packed: Layout, sequences: int) -> Tensor:
    """[N, heads, D] to [S, heads, longest, D]; the grid's unused places are zero and come after every real token."""
    grid = states.new_zeros(sequences * packed.longest, *states.shape[1:]).index_copy(0, packed.slots, states)
    return grid.unflatten(0, (sequences, packed.longest)).transpose(1, 2)


def register() -> str:
    """Makes the attention known to transformers; returns its name for ``attn_implementation``."""
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    return NAME
