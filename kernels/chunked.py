"""The linear head in chunks of rows: scan a chunk's logits, bind the loss, apply the gradient, forget the logits."""

from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from kernels.coefficients import Coefficients, PolicySpec, Rows, row_coefficients
from kernels.head import CAST_BYTES, Backend, Head, HeadGradients, RowGradients, Statistics

NO_GRADIENT_BYTES = 64 << 20
"""Without gradients nothing is gained from larger chunks."""

Needs = tuple[bool, bool, bool]
"""Whether gradients by hidden, weight and bias are asked for."""


Columns = TypeVar("Columns", Statistics, Coefficients)


def concatenate(parts: list[Columns]) -> Columns:
    """Join the per-row results of consecutive chunks."""
    return type(parts[0])(*map(torch.cat, zip(*parts, strict=True)))


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast would round the fp32 logits to bf16; precision is chosen here."""
    return torch.autocast(device.type, enabled=False)


class Span(NamedTuple):
    """A chunk: its rows, and the sequences that it holds whole (none unless rows are tied by sequences)."""

    rows: slice
    sequences: slice


def even_spans(count: int, chunk_rows: int) -> list[Span]:
    """Split ``count`` rows into chunks of about the same size, at most ``chunk_rows``."""
    size = max(1, -(-count // max(1, -(-count // chunk_rows))))
    return [Span(slice(start, min(start + size, count)), slice(0)) for start in range(0, max(1, count), size)]


def sequence_spans(lengths: list[int], chunk_rows: int) -> list[Span] | None:
    """Split rows into chunks of whole sequences, at most ``chunk_rows`` rows each; None if a sequence is longer."""
    spans: list[Span] = []
    row = sequence = stop = 0
    for index, length in enumerate(lengths):
        if length > chunk_rows:
            return None
        if stop + length - row > chunk_rows:
            spans.append(Span(slice(row, stop), slice(sequence, index)))
            row, sequence = stop, index
        stop += length
    return [*spans, Span(slice(row, stop), slice(sequence, len(lengths)))]


class Scanner:
    """Scans spans of rows of one head through one workspace."""

    def __init__(
        self, backend: Backend, hidden: Tensor, head: Head, targets: Tensor, valid: Tensor, workspace: float
    ) -> None:
        self.backend, self.hidden, self.head = backend, hidden, head
        self.valid, self.targets = valid, torch.where(valid, targets, 0)
        cast = 0 if head.weight.dtype == torch.float32 else CAST_BYTES
        self.chunk_rows = max(1, int(workspace - cast) // backend.bytes_per_row(hidden, head))
        self.logits = hidden.new_empty(0, len(head.weight), dtype=torch.float32)

    def scan(self, rows: slice) -> Statistics:
        """Statistics of a chunk, zero where ignored; its logits stay in the workspace until the next scan."""
        size = rows.stop - rows.start
        if len(self.logits) < size:
            self.logits = self.hidden.new_empty(size, len(self.head.weight), dtype=torch.float32)
        found = self.backend.scan(self.hidden[rows], self._head(rows), self.targets[rows], self.logits[:size])
        return Statistics(*(torch.where(self.valid[rows], value, 0.0) for value in found))

    def scan_all(self) -> Statistics:
        """Statistics of every row."""
        return concatenate([self.scan(span.rows) for span in even_spans(len(self.hidden), self.chunk_rows)])

    def backward(self, rows: slice, statistics: Statistics, grads: RowGradients, into: HeadGradients) -> None:
        """Apply the gradient of the chunk that was scanned last; rows whose coefficients are zero cost nothing."""
        live = ((grads.dlogprob != 0) | (grads.dentropy != 0)).nonzero().squeeze(1)
        if len(live):
            logits, targets = self.logits[: rows.stop - rows.start], self.targets[rows]
            dlogits = self.backend.dlogits(logits, self._head(rows), targets, live, statistics, grads)
            into.add(live + rows.start, dlogits)

    def _head(self, rows: slice) -> Head:
        return self.head._replace(inverse_temperature=self.head.inverse_temperature[rows])


class LinearLogprob(torch.autograd.Function):
    """Log-probabilities and entropies; the backward pass scans again, for any upstream gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        backend: Backend,
        workspace: float,
        softcap: float | None,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        valid: Tensor,
        inverse_temperature: Tensor,
    ) -> tuple[Tensor, Tensor]:
        # The parameter itself is saved: ZeRO-3 swaps its storage out between the passes.
        ctx.save_for_backward(hidden, weight, bias, targets, valid, inverse_temperature)
        ctx.backend, ctx.workspace, ctx.softcap = backend, workspace, softcap
        head = Head(weight, bias, inverse_temperature, softcap)
        with without_autocast(hidden.device):
            scanner = Scanner(backend, hidden, head, targets, valid, min(workspace, NO_GRADIENT_BYTES))
            statistics = scanner.scan_all()
        return statistics.logprobs, statistics.entropy

    @staticmethod
    def backward(ctx: Any, dlogprob: Tensor, dentropy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, targets, valid, inverse_temperature = ctx.saved_tensors
        head = Head(weight, bias, inverse_temperature, ctx.softcap)
        with without_autocast(hidden.device):
            scanner = Scanner(ctx.backend, hidden, head, targets, valid, ctx.workspace)
            spans = even_spans(len(hidden), scanner.chunk_rows)
            gradients = HeadGradients(hidden, head, ctx.needs_input_grad[3:6], len(spans))
            grads = RowGradients(torch.where(valid, dlogprob, 0.0), torch.where(valid, dentropy, 0.0))
            for rows, _ in spans:
                statistics = scanner.scan(rows)
                scanner.backward(rows, statistics, RowGradients(*(value[rows] for value in grads)), gradients)
        return None, None, None, *gradients.finish(), None, None, None


def policy_pass(
    scanner: Scanner, spec: PolicySpec, rows: Rows, needs: Needs
) -> tuple[Statistics, Coefficients, HeadGradients | None]:
    """Scan the rows, bind the loss and, where needed, apply its gradient.

    A chunk is scanned once if its coefficients depend on nothing outside it. A sequence longer than a chunk breaks that
    where ``rows.lengths`` ties rows: all rows are then scanned for the coefficients and again for the gradient.
    """
    spans: list[Span] | None = even_spans(len(scanner.hidden), scanner.chunk_rows)
    if rows.lengths is not None:
        spans = sequence_spans(rows.lengths.tolist(), scanner.chunk_rows)
    if not any(needs) or spans is None:
        statistics = scanner.scan_all()
        coefficients = row_coefficients(spec, statistics.logprobs, statistics.entropy, rows)
        if not any(needs):
            return statistics, coefficients, None
        spans = even_spans(len(scanner.hidden), scanner.chunk_rows)
        gradients = HeadGradients(scanner.hidden, scanner.head, needs, len(spans))
        for rows_, _ in spans:
            grads = RowGradients(coefficients.dlogprob[rows_], coefficients.dentropy[rows_])
            scanner.backward(rows_, scanner.scan(rows_), grads, gradients)
        return statistics, coefficients, gradients

    gradients = HeadGradients(scanner.hidden, scanner.head, needs, len(spans))
    scanned, bound = [], []
    for span in spans:
        found = scanner.scan(span.rows)
        coefficients = row_coefficients(spec, found.logprobs, found.entropy, rows.span(*span))
        grads = RowGradients(coefficients.dlogprob, coefficients.dentropy)
        scanner.backward(span.rows, found, grads, gradients)
        scanned.append(found)
        bound.append(coefficients)
    return concatenate(scanned), concatenate(bound), gradients


class LinearPolicyLoss(torch.autograd.Function):
    """The weighted loss and its metrics; the gradients are made in the forward pass and scaled in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        backend: Backend,
        workspace: float,
        softcap: float | None,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        inverse_temperature: Tensor,
        spec: PolicySpec,
        rows: Rows,
        needs: Needs,
    ) -> tuple[Tensor, ...]:
        if not any(needs):
            workspace = min(workspace, NO_GRADIENT_BYTES)
        head = Head(weight, bias, inverse_temperature, softcap)
        with without_autocast(hidden.device):
            scanner = Scanner(backend, hidden, head, targets, rows.valid, workspace)
            statistics, coefficients, gradients = policy_pass(scanner, spec, rows, needs)
        ctx.gradients = None if gradients is None else gradients.finish()
        metrics = (
            statistics.logprobs,
            statistics.entropy,
            coefficients.ratio,
            coefficients.clipped,
            coefficients.clamped,
        )
        ctx.mark_non_differentiable(*metrics)
        return coefficients.loss.sum(), *metrics

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if ctx.gradients is None:
            raise RuntimeError("linear_policy_loss: backward runs once: it gives its gradients away")
        gradients, ctx.gradients = ctx.gradients, None
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(dloss)
        return None, None, None, *gradients, None, None, None, None, None
