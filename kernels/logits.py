"""A scanner that keeps a chunk's fp32 logits, and the matrix products around it.

A backend fills in two passes over the logits: ``statistics`` after the first product, ``dlogits`` before the other two.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.head import Gradients, Head, Needs, Problem, RowGradients, Statistics, product_dtype

CAST_BYTES = 4 << 20
"""Where a product needs the weight in another dtype, it is converted in blocks of the vocabulary of this size."""


class LogitStatistics(NamedTuple):
    """Row statistics with the logsumexp in two parts, fp32 ``[n]`` each: log p = (z − maximum) − log_total.

    In one, its own rounding at |z| = 200 would be the gradient's error.
    """

    logprobs: Tensor
    entropy: Tensor
    maximum: Tensor
    log_total: Tensor


class LogitsScanner:
    """A :class:`kernels.head.Scanner` but for the passes over the logits, which a subclass has."""

    def __init__(self, problem: Problem, workspace: float, needs: Needs) -> None:
        self.problem, self.needs = problem, needs
        weight = problem.head.weight
        cast = 0 if weight.dtype == torch.float32 else CAST_BYTES
        self.chunk_rows = max(1, int(workspace - cast) // self.bytes_per_row(problem.hidden, problem.head))
        self.logits = problem.hidden.new_empty(0, len(weight), dtype=torch.float32)

    @staticmethod
    def bytes_per_row(hidden: Tensor, head: Head) -> int:
        """Workspace one row takes, ``dlogits`` included."""
        raise NotImplementedError

    @staticmethod
    def statistics(hidden: Tensor, head: Head, targets: Tensor, logits: Tensor) -> LogitStatistics:
        """Fill ``logits [n, V]`` (fp32) with z and give its row statistics."""
        raise NotImplementedError

    @staticmethod
    def dlogits(
        logits: Tensor, head: Head, targets: Tensor, rows: Tensor, statistics: LogitStatistics, grads: RowGradients
    ) -> Tensor:
        """The gradient by hidden·weightᵀ of the chunk's rows ``rows`` (others are dead), ``[len(rows), V]``."""
        raise NotImplementedError

    def scan(self, rows: slice) -> Statistics:
        size = rows.stop - rows.start
        if len(self.logits) < size:
            vocabulary = self.logits.shape[1]
            self.logits = self.logits.new_empty(0, vocabulary)  # frees the smaller one first
            self.logits = self.logits.new_empty(size, vocabulary)
        hidden, targets, valid = (
            value[rows] for value in (self.problem.hidden, self.problem.targets, self.problem.valid)
        )
        self.found = self.statistics(hidden, self._head(rows), targets, self.logits[:size])
        return Statistics(*(torch.where(valid, value, 0.0) for value in self.found[:2]))

    def begin(self, chunks: int) -> None:
        self.gradients = HeadGradients(self.problem.hidden, self.problem.head, self.needs, chunks)

    def backward(self, rows: slice, grads: RowGradients) -> None:
        live = grads.live()
        if len(live):
            logits, targets = self.logits[: rows.stop - rows.start], self.problem.targets[rows]
            dlogits = self.dlogits(logits, self._head(rows), targets, live, self.found, grads)
            self.gradients.add(live + rows.start, dlogits)

    def finish(self) -> Gradients:
        return self.gradients.finish()

    def _head(self, rows: slice) -> Head:
        head = self.problem.head
        return head._replace(inverse_temperature=head.inverse_temperature[rows])


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


class GradientSums:
    """Gradients by hidden, weight and bias, summed over chunks; each is made only where asked for.

    How a chunk's share is made is a subclass's.
    """

    rounded_chunks = 1
    """Over so many chunks dW is summed in the products' dtype, over more in fp32, so that its error does not grow."""

    def __init__(self, hidden: Tensor, head: Head, needs: Needs, chunks: int) -> None:
        self.hidden, self.head = hidden, head
        self.dtype = product_dtype(hidden.dtype)
        need_hidden, self.need_weight, need_bias = needs
        self.dhidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format) if need_hidden else None
        self.sum_dtype = self.dtype if chunks <= self.rounded_chunks else torch.float32
        self.dweight: Tensor | None = None  # a first chunk's product needs no zeros to be added to
        self.dbias = head.weight.new_zeros(len(head.weight), dtype=torch.float32) if need_bias else None

    def finish(self) -> Gradients:
        """(dhidden, dweight, dbias) in the inputs' dtypes."""
        dweight = dbias = None
        if self.need_weight:
            dweight = (self._zero_dweight() if self.dweight is None else self.dweight).to(self.head.weight.dtype)
        if self.dbias is not None and self.head.bias is not None:
            dbias = self.dbias.to(self.head.bias.dtype)
        return self.dhidden, dweight, dbias

    def _zero_dweight(self) -> Tensor:
        return torch.zeros_like(self.head.weight, dtype=self.sum_dtype, memory_format=torch.contiguous_format)


class HeadGradients(GradientSums):
    """Made of the gradient by the logits."""

    def add(self, rows: Tensor, dlogits: Tensor) -> None:
        """Add the live rows' share: dX = dz·W, dW += dzᵀ·X, db += Σ dz."""
        if self.dhidden is not None:
            # A lone row is multiplied twice: MKL adds up the product of one row a column at a time on Intel's
            # processors, which loses a digit over a large vocabulary.
            factors = dlogits if len(rows) > 1 else dlogits.repeat(2, 1)
            total = torch.zeros(len(factors), self.hidden.shape[1], dtype=self.dtype, device=rows.device)
            for columns, block in weight_blocks(self.head.weight, self.dtype):
                total.addmm_(factors[:, columns], block)
            self.dhidden.index_copy_(0, rows, total[: len(rows)].to(self.dhidden.dtype))
        if self.need_weight:
            hidden = self.hidden.index_select(0, rows).to(self.dtype)
            if self.sum_dtype != self.dtype:
                self.dweight = self._zero_dweight() if self.dweight is None else self.dweight
                for columns in block_columns(self.dweight, self.dtype):
                    self.dweight[columns] += dlogits[:, columns].t().mm(hidden)
            elif self.dweight is None:
                self.dweight = dlogits.t().mm(hidden)
            else:
                self.dweight.addmm_(dlogits.t(), hidden)
        if self.dbias is not None:
            self.dbias += dlogits.sum(0, dtype=torch.float32)
