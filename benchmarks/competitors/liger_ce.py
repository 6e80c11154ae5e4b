"""Liger's fused linear cross-entropy."""

from __future__ import annotations

import torch
from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.competitors import Outcome, Run
from benchmarks.inputs import Inputs
from benchmarks.losses import gradients


def prepare(case: Case, inputs: Inputs) -> Run:
    """Mean cross-entropy."""
    loss = LigerFusedLinearCrossEntropyLoss(reduction="mean")
    return lambda inputs: Outcome(gradients(loss(inputs.weight, inputs.hidden, inputs.targets), inputs))


@torch.no_grad()
def probe(inputs: Inputs, rows: Tensor) -> Tensor:
    """From the unreduced loss."""
    loss = LigerFusedLinearCrossEntropyLoss(reduction="none")
    return -loss(inputs.weight, inputs.hidden[rows], inputs.targets[rows])
