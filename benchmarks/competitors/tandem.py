"""Ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import kernels
from benchmarks.cases import Case
from benchmarks.competitors import Outcome, Run, Unavailable
from benchmarks.inputs import CLIP, GaeInputs, Inputs
from benchmarks.losses import BETA, gradients


def policy(case: Case, inputs: Inputs) -> Outcome:
    """Clipped PPO."""
    found = kernels.linear_policy_loss(
        inputs.hidden,
        inputs.weight,
        inputs.targets,
        advantages=inputs.advantages,
        token_weights=inputs.token_weights,
        old_logprobs=inputs.old_logprobs,
        clip_low=CLIP,
        clip_high=CLIP,
        workspace_gib=case.kind.workspace_gib,
    )
    return Outcome(gradients(found.loss, inputs), found.logprobs)


def likelihood(case: Case, inputs: Inputs) -> Outcome:
    """Cross-entropy."""
    found = kernels.linear_policy_loss(
        inputs.hidden,
        inputs.weight,
        inputs.targets,
        advantages=None,
        token_weights=inputs.token_weights,
        loss="likelihood",
        workspace_gib=case.kind.workspace_gib,
    )
    return Outcome(gradients(found.loss, inputs), found.logprobs)


def dpo(case: Case, inputs: Inputs) -> Outcome:
    """DPO with the sigmoid loss."""
    found = kernels.linear_preference_loss(
        inputs.hidden,
        inputs.weight,
        inputs.targets,
        cu_seqlens=inputs.cu_seqlens,
        ref_logprobs=inputs.ref_logprobs,
        pair_weights=inputs.pair_weights,
        loss="sigmoid",
        beta=BETA,
        label_smoothing=0.0,
        workspace_gib=case.kind.workspace_gib,
    )
    return Outcome(gradients(found.loss, inputs), found.logprobs)


@torch.no_grad()
def logprob(case: Case, inputs: Inputs) -> Outcome:
    """Log-probabilities and entropies."""
    logprobs, _ = kernels.linear_logprob(inputs.hidden, inputs.weight, inputs.targets, return_entropy=True)
    return Outcome(logprobs=logprobs)


@torch.no_grad()
def kl(case: Case, inputs: Inputs) -> Outcome:
    """KL of two heads."""
    kernels.linear_kl(inputs.hidden, inputs.weight, inputs.hidden_q, inputs.weight_q)
    return Outcome()


def gae(case: Case, inputs: GaeInputs) -> Outcome:
    """Advantages and returns."""
    kernels.gae(*inputs, gamma=1.0, lam=0.95)
    return Outcome()


STEPS: dict[str, tuple[str, Callable[[Case, Any], Outcome]]] = {
    "policy": ("linear_policy_loss", policy),
    "likelihood": ("linear_policy_loss", likelihood),
    "dpo": ("linear_preference_loss", dpo),
    "logprob": ("linear_logprob", logprob),
    "kl": ("linear_kl", kl),
    "gae": ("gae", gae),
}


def prepare(case: Case, inputs: Inputs) -> Run:
    """The public function of the case."""
    function, run = STEPS[case.name.partition("-")[0]]
    if not hasattr(kernels, function):
        raise Unavailable("missing", f"kernels.{function} is not there")
    return lambda inputs: run(case, inputs)
