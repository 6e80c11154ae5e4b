"""What a backend is, and the matrix products around it.

A backend works on a chunk of rows in two steps: ``scan`` makes the logits and their row statistics, ``dlogits`` their
gradient for the live rows only. The products that follow and their accumulation are common to all, and here.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

CAST_BYTES = 4 << 20
"""Where a product needs the weight in another dtype, it is converted in blocks of the vocabulary of this size."""


class Statistics(NamedTuple):
    """Row statistics of a scan, fp32 ``[n]`` each: log p = (z − maximum) − log_total.

    The logsumexp in two parts, because its own rounding at |z| = 200 would be the gradient's error.
    """

    logprobs: Tensor
    entropy: Tensor
    maximum: Tensor
    log_total: Tensor


class Head(NamedTuple):
    """A head and how its logits are shaped: z = softcap(hidden·weightᵀ + bias) · inverse_temperature."""

    weight: Tensor
    bias: Tensor | None
    inverse_temperature: Tensor
    softcap: float | None


class Backend(Protocol):
    """One implementation of the work over a chunk's logits."""

    def bytes_per_row(self, hidden: Tensor, head: Head) -> int:
        """Workspace one row takes, ``dlogits`` included."""

    def scan(self, hidden: Tensor, head: Head, targets: Tensor, logits: Tensor) -> Statistics:
        """Fill ``logits [n, V]`` (fp32) with z and give its row statistics."""

    def dlogits(
        self, logits: Tensor, head: Head, targets: Tensor, rows: Tensor, statistics: Statistics, grads: "RowGradients"
    ) -> Tensor:
        """The gradient by hidden·weightᵀ of the chunk's rows ``rows`` (others are dead), ``[len(rows), V]``."""


class RowGradients(NamedTuple):
    """dL/dlogprob and dL/dentropy of a chunk, fp32 ``[n]`` each."""

    dlogprob: Tensor
    dentropy: Tensor


def block_columns(weight: Tensor, dtype: torch.dtype) -> Iterator[slice]:
    """Split the vocabulary so that a block of the weight in ``dtype`` takes CAST_BYTES; whole if nothing is cast."""
    count, width = weight.shape
    step = count if weight.dtype == dtype else max(1, CAST_BYTES // (width * dtype.itemsize))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def weight_blocks(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield (columns, the weight's rows for them in ``dtype``)."""
    for columns in block_columns(weight, dtype):
        yield columns, weight[columns].to(dtype)


def linear_logits(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    """out = hidden·weightᵀ, multiplied and summed in fp32 whatever the operands' dtype."""
    hidden = hidden.float()
    for columns, block in weight_blocks(weight, torch.float32):
        torch.mm(hidden, block.t(), out=out[:, columns])


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the backward products: fp16 has no room for p·c, so it multiplies in fp32."""
    return torch.float32 if dtype == torch.float16 else dtype


class HeadGradients:
    """Gradients by hidden, weight and bias, summed over chunks; each is made only where asked for."""

    def __init__(self, hidden: Tensor, head: Head, needs: tuple[bool, bool, bool], chunks: int) -> None:
        self.hidden, self.head = hidden, head
        self.dtype = product_dtype(hidden.dtype)
        need_hidden, self.need_weight, need_bias = needs
        self.dhidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format) if need_hidden else None
        # One chunk rounds once, at its end; a sum over several is kept in fp32, so that its error does not grow.
        self.sum_dtype = self.dtype if chunks == 1 else torch.float32
        self.dweight: Tensor | None = None  # a first chunk's product needs no zeros to be added to
        self.dbias = head.weight.new_zeros(len(head.weight), dtype=torch.float32) if need_bias else None

    def add(self, rows: Tensor, dlogits: Tensor) -> None:
        """Add the live rows' share: dX = dz·W, dW += dzᵀ·X, db += Σ dz."""
        if self.dhidden is not None:
            total = torch.zeros(len(rows), self.hidden.shape[1], dtype=self.dtype, device=rows.device)
            for columns, block in weight_blocks(self.head.weight, self.dtype):
                total.addmm_(dlogits[:, columns], block)
            self.dhidden.index_copy_(0, rows, total.to(self.dhidden.dtype))
        if self.need_weight:
            hidden = self.hidden.index_select(0, rows).to(self.dtype)
            if self.sum_dtype != self.dtype:
                self.dweight = self._zero_dweight() if self.dweight is None else self.dweight
                for columns in block_columns(self.dweight, self.dtype):
                    self.dweight[columns] += dlogits[:, columns].t() @ hidden
            elif self.dweight is None:
                self.dweight = dlogits.t() @ hidden
            else:
                self.dweight.addmm_(dlogits.t(), hidden)
        if self.dbias is not None:
            self.dbias += dlogits.sum(0, dtype=torch.float32)

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(dhidden, dweight, dbias) in the inputs' dtypes."""
        dweight = dbias = None
        if self.need_weight:
            dweight = (self._zero_dweight() if self.dweight is None else self.dweight).to(self.head.weight.dtype)
        if self.dbias is not None and self.head.bias is not None:
            dbias = self.dbias.to(self.head.bias.dtype)
        return self.dhidden, dweight, dbias

    def _zero_dweight(self) -> Tensor:
        return torch.zeros_like(self.head.weight, dtype=self.sum_dtype, memory_format=torch.contiguous_format)
