"""The matrix products that the case cannot do without, through cuBLAS (or oneDNN), and nothing else.

In the row chunks of a workspace of the default size, dW accumulated in place in the weight's dtype. The gradient by
the logits holds real values (products of zeros or of noise cost another power and so another time).
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.cases import DEFAULT_WORKSPACE_GIB, Case
from benchmarks.competitors import Outcome, Run
from benchmarks.inputs import Inputs

ROWS = 128
"""Chunks are multiples of a tile, where there is more than one."""


def chunk_rows(case: Case) -> int:
    """Rows of the largest equal chunks whose logits fit into the default workspace."""
    row_bytes = case.V * getattr(torch, case.dtype).itemsize
    fitting = max(ROWS, int(DEFAULT_WORKSPACE_GIB * 2**30) // row_bytes // ROWS * ROWS)
    return -(-case.T // -(-case.T // fitting))


def prepare(case: Case, inputs: Inputs) -> Run:
    """Products in chunks."""
    return products(case, inputs, chunk_rows(case))


def products(case: Case, inputs: Inputs, rows: int) -> Run:
    """Products in chunks of ``rows``."""
    logits = inputs.weight.new_empty(rows, case.V)
    dlogits = real_dlogits(inputs, rows) if case.kind.backward else None

    @torch.no_grad()
    def run(inputs: Inputs) -> Outcome:
        weight = inputs.weight
        if dlogits is None:
            for hidden in inputs.hidden.split(rows):
                torch.mm(hidden, weight.t(), out=logits[: len(hidden)])
            if inputs.hidden_q is not None and inputs.weight_q is not None:
                for hidden in inputs.hidden_q.split(rows):
                    torch.mm(hidden, inputs.weight_q.t(), out=logits[: len(hidden)])
            return Outcome()
        dhidden, dweight = torch.empty_like(inputs.hidden), torch.empty_like(weight)
        for index, (hidden, into) in enumerate(zip(inputs.hidden.split(rows), dhidden.split(rows), strict=True)):
            gradient = dlogits[: len(hidden)]
            torch.mm(hidden, weight.t(), out=logits[: len(hidden)])
            torch.mm(gradient, weight, out=into)
            if index == 0:
                torch.mm(gradient.t(), hidden, out=dweight)
            else:
                dweight.addmm_(gradient.t(), hidden)
        return Outcome((dhidden, dweight))

    return run


@torch.no_grad()
def real_dlogits(inputs: Inputs, rows: int) -> Tensor:
    """Gradient of the mean log-probability by the logits of the first rows, a gigabyte of fp32 at a time."""
    hidden, targets = inputs.hidden[:rows], inputs.targets[:rows]
    parts = []
    for some, chosen in zip(
        *(value.split(max(1, 2**28 // len(inputs.weight))) for value in (hidden, targets)), strict=True
    ):
        gradient = -(some @ inputs.weight.t()).float().softmax(1)
        gradient.scatter_add_(1, chosen[:, None], torch.ones_like(chosen[:, None], dtype=torch.float32))
        parts.append(gradient.div_(len(inputs.hidden)).to(inputs.weight.dtype))
    return torch.cat(parts)
