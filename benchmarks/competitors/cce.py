"""Apple's cut cross-entropy with its defaults, which leave small gradients out (``filter_eps``)."""

from __future__ import annotations

import torch
from cut_cross_entropy import linear_cross_entropy
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.competitors import Outcome, Run
from benchmarks.inputs import Inputs
from benchmarks.losses import gradients


def prepare(case: Case, inputs: Inputs) -> Run:
    """Mean cross-entropy."""
    return lambda inputs: Outcome(gradients(linear_cross_entropy(inputs.hidden, inputs.weight, inputs.targets), inputs))


@torch.no_grad()
def probe(inputs: Inputs, rows: Tensor) -> Tensor:
    """From the unreduced loss."""
    return -linear_cross_entropy(inputs.hidden[rows], inputs.weight, inputs.targets[rows], reduction="none")
