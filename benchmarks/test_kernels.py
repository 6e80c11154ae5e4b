"""pytest benchmarks --benchmark: each case is a test that fails where our own kernel does; a missed target is shown."""

from pathlib import Path

import pytest

from benchmarks.cases import Case
from benchmarks.competitors import OURS
from benchmarks.measure import Setup, measure
from benchmarks.records import Record, save


@pytest.mark.timeout(600)
def test_kernels(case: Case, setup: Setup, results: list[Record], output: Path) -> None:
    found = measure(case, setup)
    results += found
    save(results, output)
    ours = next((record for record in found if record.impl == OURS), None)
    if ours is not None and ours.status == "missing":
        pytest.skip(str(ours.detail))
    assert ours is None or ours.status == "ok", f"{ours.status}: {ours.detail}"
