"""The losses in ordinary torch code, from log-probabilities on: shared by implementations that stop there."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.inputs import CLIP, Inputs

BETA = 0.1


def clipped_policy_loss(logprobs: Tensor, old: Tensor, advantages: Tensor, weights: Tensor) -> Tensor:
    """Σ weights · PPO's clipped loss (Schulman et al., arXiv 1707.06347, eq. 7)."""
    ratio = torch.exp(logprobs - old)
    return -(weights * torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)).sum()


def preference_loss(logprobs: Tensor, ref: Tensor, pair_weights: Tensor) -> Tensor:
    """Σ pair_weights · DPO's loss (Rafailov et al., arXiv 2305.18290, eq. 7); sequences of one length in pairs."""
    chosen, rejected = (logprobs - ref).view(len(pair_weights), 2, -1).sum(2).unbind(1)
    return -(pair_weights * F.logsigmoid(BETA * (chosen - rejected))).sum()


def loss_of_logprobs(name: str, logprobs: Tensor, inputs: Inputs) -> Tensor:
    """The case's loss: "policy", "likelihood" or "dpo"."""
    if name == "likelihood":
        return -(inputs.token_weights * logprobs).sum()
    if name == "dpo":
        return preference_loss(logprobs, inputs.ref_logprobs, inputs.pair_weights)
    return clipped_policy_loss(logprobs, inputs.old_logprobs, inputs.advantages, inputs.token_weights)


def gradients(loss: Tensor, inputs: Inputs) -> tuple[Tensor, ...]:
    """Gradients by hidden and weight; the upstream gradient is 1, as in training."""
    return torch.autograd.grad(loss, (inputs.hidden, inputs.weight))
