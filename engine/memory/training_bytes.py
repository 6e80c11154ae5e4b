"""What a process and the training in it take of a GPU, in bytes, by the source of what allocates it.

DeepSpeed 0.19.8's optimizers with the settings of ``engine.training.zero``, transformers' decoders with Liger's kernels
and a variable-length attention, ``kernels``' loss head. What no source says is a constant here only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec

from engine.config import Config
from engine.machine import devices
from engine.memory.model_shape import ModelShape
from engine.memory.units import GIB, MIB
from engine.models.kinds import LLAMA_LIKE

# Estimates for an H100 with CUDA 13 that a measurement there has to correct.
PROCESS_BYTES = 768 * MIB
"""CUDA context, loaded kernels and cuBLAS workspaces of a process that trains and samples."""
NCCL_BYTES = 512 * MIB
"""NCCL's buffers for the run's and vLLM's groups; with several ranks only."""
ALLOCATOR_SHARE = 0.05
"""PyTorch's allocator holds so much more than the activations and gradients of a training step need."""

REDUCE_BUCKET = 50_000_000
"""Gradient elements that are averaged over ranks at a time. ZeRO-3 keeps a buffer of this size for each engine, and
DeepSpeed's default of ten times as much takes 1 GB in 16 bits."""
GATHERED_ELEMENTS = 1_000_000_000
"""ZeRO-3 keeps so much gathered on the way from the forward to the backward pass (``stage3_max_reuse_distance``)."""
FETCHED_ELEMENTS = 50_000_000
"""What ZeRO-3 fetches ahead in one go (``stage3_prefetch_bucket_size``): gathered as one and then copied apart."""
ENTROPY_BYTES_PER_LOGIT = 4
"""The loss head keeps exp(z) in fp32 rather than 16 bits where the entropy or a soft cap changes the gradient."""
SCAN_TILE = 256
"""Columns of the loss head's scan that share a row's statistics, 8 bytes; a row has 96 bytes more."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One model under DeepSpeed. All sizes are bytes on one rank."""

    parameters: int
    largest: int
    """Parameters of its largest tensor."""
    item: int
    """Bytes of a number it computes in: 2 or 4."""
    stage: int
    ranks: int
    adapters: int = 0
    """LoRA's parameters, beside ``parameters`` and trained in their place; 0 trains those."""
    layer: int = 0
    """Parameters of a decoder layer if ZeRO-3 gathers and reduces it whole."""
    on_host: bool = False
    """``train.optimizer_offload``, with ZeRO-2 or 3: states and gradients are in host memory."""

    @property
    def trained(self) -> int:
        """Parameters with gradients and optimizer states."""
        return self.adapters or self.parameters

    def _shard(self, bytes_per_parameter: int) -> int:
        return bytes_per_parameter * math.ceil(self.trained / self.ranks)

    @property
    def weights(self) -> int:
        """The weights that forward passes read; under ZeRO-3 the rank's part, and small ones (adapters) whole."""
        parameters = math.ceil(self.parameters / self.ranks) if self.stage == 3 else self.parameters
        return self.item * (parameters + self.adapters)

    @property
    def states(self) -> int:
        """fp32 master weights and AdamW's two moments."""
        if self.on_host:
            return 0
        if self.stage == 0:  # on fp32 weights AdamW works in place
            return (8 if self.item == 4 else 12) * self.trained
        return self._shard(12)

    @property
    def host(self) -> int:
        """Host memory: fp32 weights, moments and gradients; the new weights and the accumulated gradients besides."""
        return self._shard(16 + 2 * self.item) if self.on_host else 0

    @property
    def buffers(self) -> int:
        """What ZeRO-3 never frees, gradients and the bucket they are reduced in; or ZeRO-2's way to the host."""
        if self.on_host:
            return self.item * (REDUCE_BUCKET if self.stage == 3 else min(self.largest, self.trained))
        return self._shard(self.item) + self.item * REDUCE_BUCKET if self.stage == 3 else 0

    @property
    def accumulated(self) -> int:
        """Gradients between two microbatches. ZeRO-1 keeps its bucket with them until the step."""
        if self.on_host:
            return 0
        bucket = self.item * REDUCE_BUCKET
        whole = self.item * self.trained
        return {0: whole, 1: whole + bucket, 2: self._shard(self.item), 3: 0}[self.stage]

    @property
    def gathered(self) -> int:
        """Whole weights that ZeRO-3 holds between forward and backward pass; a single rank has them anyway."""
        if self.stage < 3 or self.ranks == 1:
            return 0
        fetched = min(self.parameters, max(FETCHED_ELEMENTS, self.largest, self.layer))
        return self.item * (min(self.parameters, GATHERED_ELEMENTS) + fetched)

    @property
    def in_flight(self) -> int:
        """A backward pass's gradients on top of ``accumulated``."""
        largest = self.item * min(self.largest, self.trained)
        bucket = self.item * REDUCE_BUCKET
        copy = min(max(largest, bucket), self.item * self.trained)  # what is reduced is flattened first
        if self.stage < 2:
            return largest
        if self.stage == 2 and self.on_host:  # those larger than a bucket, of embedding and head, stay to the end
            return 2 * largest + bucket + copy
        if self.stage == 2:
            return self._shard(self.item) + bucket + copy
        return max(largest, self.item * min(self.layer, self.trained)) + copy

    @property
    def step(self) -> int:
        """An optimizer step in place of ``accumulated``: gradients, the same flattened, and in fp32."""
        if self.on_host:  # one gradient at a time comes back to be measured and to become fp32
            return (self.item + 4) * min(self.largest, self.trained)
        if self.stage == 0:
            return self.accumulated + 4 * self.trained
        kept = 0 if self.stage == 3 else self._shard(self.item)
        return kept + self._shard(self.item) + (self._shard(4) if self.item == 2 else 0)


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward and backward pass over a microbatch on a rank. All sizes are bytes."""

    shape: ModelShape
    tokens: int
    item: int
    checkpointing: bool
    fused: bool
    """With Liger's RMSNorm and SwiGLU; in 16 bits with ``engine.training.residual``'s fp32 stream and its norm."""
    frozen_head: bool = False

    @property
    def _stream(self) -> int:
        """Bytes of a number of the residual stream."""
        return 4 if self.fused else self.item

    @property
    def _stream_norm(self) -> int:
        """RMSNorm of one token of the stream; Liger's and the plain one keep a statistic too, ours does not."""
        if self.fused and self.item == 2:
            return (self._stream + self.item) * self.shape.hidden
        return self._norm(self.shape.hidden) + 4

    def _norm(self, width: int) -> int:
        """RMSNorm of one token: its input and its output; plain, what it multiplied by too, once in fp32."""
        return (2 * self.item if self.fused else 4 + 2 * self.item) * width

    @property
    def layer(self) -> int:
        """What one layer saves for its backward pass, for each token.

        Besides the norms: q, k, v, attention's output and a logsumexp a head; gate, up and their product, and the
        activated gate if that is an operation of its own.
        """
        s, b = self.shape, self.item
        query, key_value = s.heads * s.head_dim, s.kv_heads * s.head_dim
        attention = b * (2 * query + 2 * key_value) + 4 * s.heads
        qk_norm = self._norm(query + key_value) - b * (query + key_value) if s.qk_norm else 0
        mlp = (3 if self.fused else 4) * b * s.intermediate
        return 2 * self._stream_norm + attention + qk_norm + mlp

    @property
    def activations(self) -> int:
        """Saved up to the last norm's output; with checkpointing each layer's input, and one layer recomputed."""
        s = self.shape
        kept = s.layers * self._stream * s.hidden + self.layer if self.checkpointing else s.layers * self.layer
        return self.tokens * (kept + self._stream_norm)

    @property
    def backward(self) -> int:
        """Gradients by activations that are alive at a time in a layer."""
        s = self.shape
        return self.tokens * (self.item * (s.intermediate + 2 * s.hidden) + self._stream * s.hidden)

    def head(self, workspace: float, entropy: bool) -> int:
        """The loss head at its fullest: rows, dX, dW, dW's fp32 sum over several chunks, scratch memory.

        Args:
            workspace: bound on the scratch memory.
            entropy: the loss has an entropy bonus.
        """
        s, b = self.shape, self.item
        reshapes = entropy or s.softcap
        row = s.vocabulary * (ENTROPY_BYTES_PER_LOGIT if reshapes else b) + b * s.hidden
        row += 8 * math.ceil(s.vocabulary / SCAN_TILE) + 96
        chunk = max(1, int(workspace) // row)
        sums = 4 * s.embedding if self.tokens > 2 * chunk and b == 2 and not self.frozen_head else 0
        return 2 * b * self.tokens * s.hidden + self.head_gradient + sums + row * min(chunk, self.tokens)

    @property
    def head_gradient(self) -> int:
        """dW."""
        return 0 if self.frozen_head else self.item * self.shape.embedding


def training(
    config: Config,
    models: dict[str, tuple[ModelShape, int]],
    engines: dict[str, Engine],
    ranks: int,
    checkpointing: bool,
) -> dict[str, int]:
    """The transient parts of training at its fullest moment: in a backward pass, or in an optimizer step.

    In each minibatch every microbatch passes through the policy, then through the value model; then both step.
    """
    train = config.train
    episodes = config.episodes_per_step // ranks // train.minibatches_per_batch
    longest = config.longest_sequence
    tokens = min(train.tokens_per_microbatch, episodes * longest)
    several = episodes * longest > train.tokens_per_microbatch
    names = list(engines)
    moments = []
    for place, (name, engine) in enumerate(engines.items()):
        shape = models[name][0]
        one = Pass(shape, tokens, engine.item, checkpointing, _fused(shape), frozen_head=engine.adapters > 0)
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
    fullest["allocator"] = int(ALLOCATOR_SHARE * sum(fullest.values()))
    return fullest


def _fused(shape: ModelShape) -> bool:
    """Whether Liger's kernels will run; a plan made where no GPU is takes them for installed where one is."""
    return shape.kind in LLAMA_LIKE and (find_spec("liger_kernel") is not None or devices.visible_gpus() == 0)


def item_bytes(config: Config) -> int:
    """Bytes of a number that models compute in."""
    return 4 if config.model.dtype == "float32" else 2
