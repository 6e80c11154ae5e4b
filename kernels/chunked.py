"""A problem in chunks of rows: scan a chunk, bind the loss, apply its gradient, forget the chunk."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from kernels.head import Backend, Gradients, Needs, Problem, RowGradients, Scanner, Statistics

NO_GRADIENT_BYTES = 64 << 20
"""Without gradients nothing is gained from larger chunks."""

TILE_ROWS = 128
"""Chunks longer than this are multiples of it, but for the last: no backend likes a product with a ragged edge."""

Columns = TypeVar("Columns", bound=tuple[Tensor, ...])


class Span(NamedTuple):
    """A chunk: its rows, and the units (sequences, pairs) that it holds whole; none unless rows are tied by units."""

    rows: slice
    units: slice


Bind = Callable[[Statistics, Span], tuple[tuple[Tensor, ...], RowGradients]]
"""What a loss makes of a span's statistics: columns to be kept, and the rows' gradients."""


def concatenate(parts: list[Columns]) -> Columns:
    """Join the results of consecutive chunks, column by column."""
    if len(parts) == 1:
        return parts[0]
    columns = list(map(torch.cat, zip(*parts, strict=True)))
    first = parts[0]
    return first._make(columns) if hasattr(first, "_make") else type(first)(columns)


def cut(count: int, size: int) -> list[Span]:
    """Split ``count`` rows into chunks of ``size`` and what is left."""
    return [Span(slice(start, min(start + size, count)), slice(0)) for start in range(0, max(1, count), size)]


def even_spans(count: int, chunk_rows: int) -> list[Span]:
    """Split ``count`` rows into the fewest chunks of at most ``chunk_rows``, of about the same size."""
    size = max(1, -(-count // max(1, -(-count // chunk_rows))))
    if size > TILE_ROWS:
        size = min(chunk_rows, -(-size // TILE_ROWS) * TILE_ROWS)
    return cut(count, size)


def unit_spans(lengths: list[int], chunk_rows: int) -> list[Span] | None:
    """Split rows into chunks of whole units, at most ``chunk_rows`` rows each; None if a unit is longer."""
    spans: list[Span] = []
    row = unit = stop = 0
    for index, length in enumerate(lengths):
        if length > chunk_rows:
            return None
        if stop + length - row > chunk_rows:
            spans.append(Span(slice(row, stop), slice(unit, index)))
            row, unit = stop, index
        stop += length
    return [*spans, Span(slice(row, stop), slice(unit, len(lengths)))]


def scanner_spans(scanner: Scanner, count: int) -> list[Span]:
    """The chunks in which a scanner likes to work through rows that are not tied."""
    preferred = getattr(scanner, "preferred_rows", None)
    return even_spans(count, scanner.chunk_rows) if preferred is None else cut(count, preferred)


def scan_all(scanner: Scanner, count: int) -> Statistics:
    """Statistics of every row."""
    return concatenate([scanner.scan(span.rows) for span in scanner_spans(scanner, count)])


def scan_only(backend: Backend, problem: Problem, workspace: float) -> Statistics:
    """Statistics of every row, without keeping anything for a gradient."""
    scanner = backend.make_scanner(problem, min(workspace, NO_GRADIENT_BYTES), (False, False, False))
    return scan_all(scanner, len(problem.hidden))


def backward_all(scanner: Scanner, count: int, grads: RowGradients) -> Gradients:
    """Scan every chunk and apply its rows' gradients."""
    spans = scanner_spans(scanner, count)
    scanner.begin(len(spans))
    for rows, _ in spans:
        scanner.scan(rows)
        scanner.backward(rows, grads.span(rows))
    return scanner.finish()


def loss_pass(
    backend: Backend, problem: Problem, lengths: list[int] | None, bind: Bind, needs: Needs, workspace: float
) -> tuple[Statistics, tuple[Tensor, ...], Gradients]:
    """Scan the rows, bind the loss and, where needed, apply its gradient.

    A chunk is scanned once if its coefficients depend on nothing outside it. A unit longer than a chunk breaks that
    where ``lengths`` (the rows of each unit) ties rows: all rows are then scanned for the coefficients and again for
    the gradient.
    """
    count = len(problem.hidden)
    whole = Span(slice(0, count), slice(0, len(lengths or ())))
    if not any(needs):
        statistics = scan_only(backend, problem, workspace)
        return statistics, bind(statistics, whole)[0], (None, None, None)

    scanner = backend.make_scanner(problem, workspace, needs)
    spans = scanner_spans(scanner, count) if lengths is None else unit_spans(lengths, scanner.chunk_rows)
    if spans is None:
        statistics = scan_all(scanner, count)
        columns, grads = bind(statistics, whole)
        return statistics, columns, backward_all(scanner, count, grads)

    scanner.begin(len(spans))
    scanned, bound = [], []
    for span in spans:
        found = scanner.scan(span.rows)
        columns, grads = bind(found, span)
        scanner.backward(span.rows, grads)
        scanned.append(found)
        bound.append(columns)
    return concatenate(scanned), concatenate(bound), scanner.finish()
