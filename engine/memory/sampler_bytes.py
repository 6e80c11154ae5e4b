"""What vLLM takes of a GPU beside its weights and its KV cache, in bytes. By the source of vLLM 0.26."""

from __future__ import annotations

import math

from engine.memory.model_shape import ModelShape
from engine.memory.units import MIB

# Estimates for an H100 with CUDA 13 that a measurement there has to correct.
BUFFER_BYTES = 256 * MIB
"""What vLLM keeps while it sleeps: block tables, input batch, attention workspaces."""
GRAPH_BYTES_PER_LAYER = 24 * MIB
"""CUDA graphs of vLLM, all captured batch sizes together, for each layer."""

BATCHED_TOKENS = 16384
"""vLLM's default for tokens in one forward pass on cards of 70 GiB and more; on smaller ones and A100s it is half."""
LOGIT_COPIES = 4
"""vLLM's sampler: fp32 logits, log-probabilities, probabilities and noise."""


def always(shape: ModelShape) -> int:
    """What stays also while vLLM sleeps: buffers and CUDA graphs."""
    return BUFFER_BYTES + GRAPH_BYTES_PER_LAYER * shape.layers


def activations(shape: ModelShape, item: int, tensor_parallel: int, sequences: int, prompt: int) -> int:
    """The larger of prompts passing through an MLP, as many as vLLM takes at a time, and of sampling all sequences."""
    tokens = min(BATCHED_TOKENS, sequences * prompt)
    prefill = tokens * item * (2 * shape.hidden + 3 * math.ceil(shape.intermediate / tensor_parallel))
    return max(prefill, LOGIT_COPIES * 4 * sequences * shape.vocabulary)
