"""The size of the KV cache: of a token's keys and values, and of so many sequences in vLLM's blocks."""

from __future__ import annotations

import math

from engine.memory.model_shape import ModelShape

BLOCK_TOKENS = 16
"""Tokens in a block of vLLM's KV cache on a GPU."""


def bytes_per_token(shape: ModelShape, item: int, tensor_parallel: int) -> int:
    """Keys and values of one token on one rank, of ``item`` bytes a number.

    Heads are not split further than one a rank.
    """
    return 2 * shape.layers * math.ceil(shape.kv_heads / tensor_parallel) * shape.head_dim * item


def size(shape: ModelShape, item: int, tensor_parallel: int, sequences: int, length: int) -> int:
    """Bytes for so many sequences of full length, in vLLM's blocks, one of which it leaves empty."""
    blocks = sequences * math.ceil(length / BLOCK_TOKENS) + 1
    return blocks * block_bytes(shape, item, tensor_parallel)


def block_bytes(shape: ModelShape, item: int, tensor_parallel: int) -> int:
    """Bytes of a block on one rank."""
    return BLOCK_TOKENS * bytes_per_token(shape, item, tensor_parallel)
