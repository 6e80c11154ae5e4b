"""Attention over packed sequences, registered with transformers as ``packed_sdpa``.

A packed row goes through PyTorch's scaled-dot-product attention as one batch row a sequence, so no token sees another
sequence and no [N, N] mask exists. Models reach it through transformers' attention interface.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from engine.training.packing import Layout

NAME = "packed_sdpa"


def packed_sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: Layout,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each packed sequence.

    Args:
        query: [1, heads, N, D]; key, value: [1, kv_heads, N, D].
        packed: the row's layout, handed through the model's forward.

    Returns:
        [1, N, heads, D], and no attention weights.

    Raises:
        NotImplementedError: for variants of attention that this one does not compute.
    """
    if softcap is not None:
        raise NotImplementedError("packed_sdpa computes no soft-capped attention logits (this model wants them)")
    if sliding_window is not None and packed.longest > sliding_window:
        raise NotImplementedError(
            f"packed_sdpa has no sliding window: {packed.longest} tokens exceed the model's {sliding_window}"
        )
    sequences = len(packed.cu_seqlens) - 1
    q, k, v = (_spread(states[0].transpose(0, 1), packed, sequences) for states in (query, key, value))
    out = F.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2).flatten(0, 1)[packed.slots][None], None


def _spread(states: Tensor, packed: Layout, sequences: int) -> Tensor:
    """[N, heads, D] to [S, heads, longest, D]; the grid's unused places are zero and come after every real token."""
    grid = states.new_zeros(sequences * packed.longest, *states.shape[1:]).index_copy(0, packed.slots, states)
    return grid.unflatten(0, (sequences, packed.longest)).transpose(1, 2)


def register() -> str:
    """Makes the attention known to transformers; returns its name for ``attn_implementation``."""
    AttentionInterface.register(NAME, packed_sdpa)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    return NAME
