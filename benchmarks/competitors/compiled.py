"""The eager code through torch.compile, one static graph a shape."""

from __future__ import annotations

from functools import partial

import torch
import torch._dynamo

from benchmarks.cases import Case
from benchmarks.competitors import Run, eager
from benchmarks.inputs import Inputs

torch._dynamo.config.recompile_limit = 256  # dynamo would otherwise go back to eager after eight shapes


def prepare(case: Case, inputs: Inputs) -> Run:
    """Compiles at the first call."""
    compiled = partial(torch.compile, fullgraph=True, dynamic=False)
    return eager.assemble(case, compiled(eager.loss), compiled(eager.logprobs_and_entropy), compiled(eager.two_head_kl))
