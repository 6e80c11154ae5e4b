"""Liger's fused linear GRPO loss: token ratios, no KL, "dapo" (a mean over tokens), so the same loss as ours."""

from __future__ import annotations

import torch
import torch._dynamo
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase
from torch import Tensor

from benchmarks.cases import SEQUENCE, Case
from benchmarks.competitors import Outcome, Run
from benchmarks.inputs import CLIP, Inputs
from benchmarks.losses import gradients

torch._dynamo.config.recompile_limit = 256  # it compiles its loss anew for every shape


def prepare(case: Case, inputs: Inputs) -> Run:
    """With its default chunks of one sequence."""
    loss = LigerFusedLinearGRPOLoss(
        beta=0.0, use_ref_model=False, epsilon_low=CLIP, epsilon_high=CLIP, loss_type="dapo"
    )

    def run(inputs: Inputs) -> Outcome:
        value, _ = loss(
            inputs.hidden.view(-1, SEQUENCE, case.H),
            inputs.weight,
            inputs.targets.view(-1, SEQUENCE),
            torch.ones(case.T // SEQUENCE, SEQUENCE, device=inputs.hidden.device),
            inputs.advantages[::SEQUENCE],
            old_per_token_logps=inputs.old_logprobs.view(-1, SEQUENCE),
        )
        return Outcome(gradients(value, inputs))

    return run


@torch.no_grad()
def probe(inputs: Inputs, rows: Tensor) -> Tensor:
    """From the function that its loss gets them from."""
    hidden, targets = inputs.hidden[rows], inputs.targets[rows]
    return LigerFusedLinearPPOBase.chunk_forward(hidden[None], inputs.weight, targets[None])[0]
