"""Inputs of a case, and what they should give in fp64 on a few rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.cases import SEQUENCE, Case

CLIP = 0.2
LIVE_LOG_RATIO, DEAD_LOG_RATIO = 0.1, 0.5
"""exp(±0.1) is inside the clipping range, exp(±0.5) outside."""
CHECKED_ROWS = 64
BLOCK = 1 << 14


@dataclass
class Inputs:
    """Everything that some loss takes; what the case has no use for is None."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    advantages: Tensor
    """``[T]``, one value for all tokens of a sequence."""
    token_weights: Tensor
    """1/T: losses are means, so that no implementation has to scale its gradients afterwards."""
    old_logprobs: Tensor
    cu_seqlens: Tensor
    ref_logprobs: Tensor
    pair_weights: Tensor
    hidden_q: Tensor | None = None
    weight_q: Tensor | None = None


class GaeInputs(NamedTuple):
    """Inputs of :func:`kernels.gae`."""

    rewards: Tensor
    values: Tensor
    cu_seqlens: Tensor


def make_gae_inputs(case: Case, device: str, seed: int) -> GaeInputs:
    """Random rewards and values of sequences of the same length."""
    generator = torch.Generator(device).manual_seed(seed)
    rewards, values = torch.randn(2, case.T, device=device, generator=generator)
    return GaeInputs(rewards, values, torch.arange(0, case.T + 1, SEQUENCE, device=device, dtype=torch.int32))


def make_inputs(case: Case, device: str, seed: int, like: Inputs | None = None) -> Inputs:
    """Inputs with logits of standard deviation 1; fresh ones for the heads of ``like`` if given.

    Peaked inputs add a multiple of the target's row of the weight to ``hidden``: p is about 0.1 to 0.95, and 1 − 1e-12
    or less in every sixteenth row.
    """
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, generator=generator)

    weight = normal(case.V, case.H).mul_(case.H**-0.5) if like is None else like.weight.detach()
    hidden = normal(case.T, case.H)
    targets = torch.randint(case.V, (case.T,), device=device, generator=generator)
    if case.inputs == "peaked":
        height = math.log(case.V) + 0.5 + 5 * torch.rand(case.T, device=device, generator=generator) - 2
        height[::16] += 28
        hidden += height.to(dtype)[:, None] * weight[targets]

    sequences = -(-case.T // SEQUENCE)
    signed = torch.randn(sequences, device=device, generator=generator)
    advantages = (signed + signed.sign() / 2).repeat_interleave(SEQUENCE)[: case.T]
    logprobs = float32_logprobs(hidden, weight, targets)
    log_ratio = LIVE_LOG_RATIO * (2 * torch.rand(case.T, device=device, generator=generator) - 1)
    if case.kind.half_dead:  # the ratio leaves the clipping range on the side where clipping stops the gradient
        dead = torch.randperm(case.T, device=device, generator=generator)[: case.T - case.live_rows]
        log_ratio[dead] = DEAD_LOG_RATIO * advantages[dead].sign()
    noise = torch.randn(case.T, device=device, generator=generator)

    hidden_q = weight_q = None
    if case.name == "kl":
        hidden_q = hidden + 0.1 * normal(case.T, case.H)
        weight_q = weight + 0.1 * case.H**-0.5 * normal(case.V, case.H) if like is None else like.weight_q
    differentiated = case.kind.backward > 0
    return Inputs(
        hidden.requires_grad_(differentiated),
        weight.requires_grad_(differentiated),
        targets,
        advantages,
        torch.full((case.T,), 1 / case.T, device=device),
        (logprobs - log_ratio).clamp(max=0),
        torch.arange(0, case.T + 1, SEQUENCE, dtype=torch.int32),  # on the CPU, as the kernels like it
        logprobs + 0.1 * noise,
        torch.full((sequences // 2,), 2 / sequences, device=device),
        hidden_q,
        weight_q,
    )


@torch.no_grad()
def float32_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities from fp32 products, a gigabyte of logits at a time."""
    head = weight.float().t()
    parts = []
    for rows, chosen in zip(*(value.split(max(1, 2**28 // len(weight))) for value in (hidden, targets)), strict=True):
        logits = rows.float() @ head
        parts.append(logits.gather(1, chosen[:, None]).squeeze(1) - logits.logsumexp(1))
    return torch.cat(parts)


class Exact(NamedTuple):
    """fp64 results for a few rows."""

    rows: Tensor
    logprobs: Tensor
    dhidden: Tensor | None
    """Gradient by these rows of hidden, where the loss sees each token by itself."""

    def logprob_error(self, logprobs: Tensor) -> float:
        """Largest absolute error; ``logprobs`` are those of :attr:`rows`."""
        return float((logprobs.double() - self.logprobs).abs().max())

    def gradient_error(self, dhidden: Tensor) -> float | None:
        """Root mean square over the live rows of ‖error‖ / ‖gradient‖; ``dhidden`` has every row."""
        if self.dhidden is None:
            return None
        norms = self.dhidden.norm(dim=1)
        errors = (dhidden[self.rows].double() - self.dhidden).norm(dim=1)
        return float((errors / norms)[norms > 0].square().mean().sqrt())


@torch.no_grad()
def exact(case: Case, inputs: Inputs) -> Exact:
    """Results in fp64 for evenly spaced rows, a block of the vocabulary at a time."""
    rows = torch.linspace(0, case.T - 1, min(CHECKED_ROWS, case.T), device=inputs.hidden.device).long()
    hidden, targets = inputs.hidden[rows].double(), inputs.targets[rows]
    blocks = inputs.weight.split(BLOCK)
    logits = torch.cat([hidden @ block.double().t() for block in blocks], 1)
    logp = logits.log_softmax(1)
    logprobs = logp.gather(1, targets[:, None]).squeeze(1)
    coefficient = _dlogprob(case, inputs, rows, logprobs)
    if coefficient is None:
        return Exact(rows, logprobs, None)
    # 1 − p of the target, as it stands in onehot − p, from the other columns: nothing cancels as p → 1
    dlogits = -logp.exp()
    dlogits.scatter_(1, targets[:, None], 0.0)
    dlogits.scatter_(1, targets[:, None], -dlogits.sum(1, keepdim=True))
    product = sum(part @ block.double() for part, block in zip(dlogits.split(BLOCK, 1), blocks, strict=True))
    return Exact(rows, logprobs, coefficient[:, None] * product)


def _dlogprob(case: Case, inputs: Inputs, rows: Tensor, logprobs: Tensor) -> Tensor | None:
    """∂loss/∂logprob of the rows; None for a loss that ties tokens together or has no gradient."""
    weights = inputs.token_weights[rows].double()
    if case.name == "likelihood":
        return -weights
    if not case.name.startswith("policy"):
        return None
    advantages = inputs.advantages[rows].double()
    ratio = (logprobs - inputs.old_logprobs[rows].double()).exp()
    plain, clipped = ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages
    return torch.where(plain <= clipped, -weights * plain, 0.0)
