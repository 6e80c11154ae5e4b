"""QuACK's chunked linear cross-entropy."""

from __future__ import annotations

from quack.linear_cross_entropy import chunked_linear_cross_entropy

from benchmarks.cases import Case
from benchmarks.competitors import Outcome, Run
from benchmarks.inputs import Inputs
from benchmarks.losses import gradients


def prepare(case: Case, inputs: Inputs) -> Run:
    """Mean cross-entropy with its default chunks."""

    def run(inputs: Inputs) -> Outcome:
        return Outcome(gradients(chunked_linear_cross_entropy(inputs.hidden, inputs.weight, inputs.targets), inputs))

    return run
