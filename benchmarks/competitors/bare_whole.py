"""The bare products over all rows at once."""

from __future__ import annotations

from benchmarks.cases import Case
from benchmarks.competitors import Run, Unavailable
from benchmarks.competitors.bare import chunk_rows, products
from benchmarks.inputs import Inputs

LARGEST_ROWS = 8192
"""Beyond, its [T, V] buffers would take from the others' memory."""


def prepare(case: Case, inputs: Inputs) -> Run:
    """Products of whole matrices."""
    if chunk_rows(case) >= case.T:
        raise Unavailable("same as bare", "all rows are in one chunk")
    if case.T > LARGEST_ROWS:
        raise Unavailable("left out", f"only up to T={LARGEST_ROWS}")
    return products(case, inputs, case.T)
