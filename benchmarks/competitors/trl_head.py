"""TRL 1.16's chunked Triton head, as its trainers call it, with the loss in ordinary torch code."""

from __future__ import annotations

import torch
import trl.trainer.utils  # noqa: F401  (its backward pass imports this; not while the clock runs)
from torch import Tensor
from trl.kernels import ChunkedLogProbFunction

from benchmarks.cases import Case
from benchmarks.competitors import Outcome, Run
from benchmarks.inputs import Inputs
from benchmarks.losses import gradients, loss_of_logprobs

VOCABULARY_CHUNK = 32768
"""trl.trainer.utils calls it with this."""


def prepare(case: Case, inputs: Inputs) -> Run:
    """Log-probabilities, with entropies only where they are the case."""
    return scan if case.name == "logprob" else lambda inputs: differentiate(case, inputs)


def head(inputs: Inputs, outputs: tuple[str, ...] = ()) -> Tensor:
    """Log-probabilities; the other outputs are made and dropped."""
    found = ChunkedLogProbFunction.apply(
        inputs.hidden, inputs.weight, None, inputs.targets, 1.0, VOCABULARY_CHUNK, None, 1.0, outputs
    )
    return found[0]


def differentiate(case: Case, inputs: Inputs) -> Outcome:
    """A loss and its gradients."""
    logprobs = head(inputs)
    loss = loss_of_logprobs(case.name.partition("-")[0], logprobs, inputs)
    return Outcome(gradients(loss, inputs), logprobs.detach())


@torch.no_grad()
def scan(inputs: Inputs) -> Outcome:
    """Log-probabilities and entropies."""
    return Outcome(logprobs=head(inputs, ("entropy",)))
