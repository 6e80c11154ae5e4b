"""Ordinary torch code on whole logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import SEQUENCE, Case
from benchmarks.competitors import Outcome, Run
from benchmarks.inputs import GaeInputs, Inputs
from benchmarks.losses import gradients, loss_of_logprobs


def head_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities, fp32 from the logits on."""
    return -F.cross_entropy((hidden @ weight.t()).float(), targets, reduction="none")


def loss(name: str, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Loss and log-probabilities."""
    logprobs = head_logprobs(inputs.hidden, inputs.weight, inputs.targets)
    return loss_of_logprobs(name, logprobs, inputs), logprobs


def logprobs_and_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row."""
    logp = (hidden @ weight.t()).float().log_softmax(1)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(1)


def two_head_kl(hidden: Tensor, weight: Tensor, hidden_q: Tensor, weight_q: Tensor) -> Tensor:
    """KL(p‖q) of each row."""
    logp = (hidden @ weight.t()).float().log_softmax(1)
    logq = (hidden_q @ weight_q.t()).float().log_softmax(1)
    return (logp.exp() * (logp - logq)).sum(1)


def prepare(case: Case, inputs: Inputs) -> Run:
    """The whole step; compiling is another implementation."""
    return run_gae if case.name == "gae" else assemble(case, loss, logprobs_and_entropy, two_head_kl)


def assemble(
    case: Case, loss: Callable[..., Any], logprobs_and_entropy: Callable[..., Any], two_head_kl: Callable[..., Any]
) -> Run:
    """The case's step of these functions, compiled or not."""
    name = case.name.partition("-")[0]  # the kinds of "policy" differ in their inputs

    def differentiate(inputs: Inputs) -> Outcome:
        value, logprobs = loss(name, inputs)
        return Outcome(gradients(value, inputs), logprobs.detach())

    @torch.no_grad()
    def scan(inputs: Inputs) -> Outcome:
        return Outcome(logprobs=logprobs_and_entropy(inputs.hidden, inputs.weight, inputs.targets)[0])

    @torch.no_grad()
    def diverge(inputs: Inputs) -> Outcome:
        two_head_kl(inputs.hidden, inputs.weight, inputs.hidden_q, inputs.weight_q)
        return Outcome()

    return {"logprob": scan, "kl": diverge}.get(case.name, differentiate)


def run_gae(inputs: GaeInputs) -> Outcome:
    """γ = 1, λ = 0.95, one position of all sequences at a time: they have one length."""
    rewards, values = inputs.rewards.view(-1, SEQUENCE), inputs.values.view(-1, SEQUENCE)
    advantages = torch.empty_like(rewards)
    after = next_value = torch.zeros_like(rewards[:, 0])
    for position in reversed(range(SEQUENCE)):
        after = rewards[:, position] + next_value - values[:, position] + 0.95 * after
        next_value = values[:, position]
        advantages[:, position] = after
    _ = advantages + values
    return Outcome()
