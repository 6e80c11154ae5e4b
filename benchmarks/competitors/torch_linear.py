"""torch's own F.linear_cross_entropy with its chunked path (torch 2.13 or so)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.cases import Case
from benchmarks.competitors import Outcome, Run, Unavailable
from benchmarks.inputs import Inputs
from benchmarks.losses import gradients


def prepare(case: Case, inputs: Inputs) -> Run:
    """Mean cross-entropy with the default chunks."""
    if not hasattr(F, "linear_cross_entropy"):
        raise Unavailable("not installed", f"torch {torch.__version__} has no F.linear_cross_entropy")
    options = torch.nn.LinearCrossEntropyOptions()

    def run(inputs: Inputs) -> Outcome:
        loss = F.linear_cross_entropy(inputs.hidden, inputs.weight, inputs.targets, reduction="mean", options=options)
        return Outcome(gradients(loss, inputs))

    return run
