"""Results: one record a measurement, in JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

NOT_TRIED = frozenset({"no time", "not installed"})


@dataclass(frozen=True)
class Record:
    """A measurement of one implementation on one case, or why there is none. The README explains the fields."""

    case: str
    impl: str
    T: int
    H: int
    V: int
    inputs: str
    dtype: str
    live_rows: int
    workspace_gib: float | None
    status: str
    card: str
    torch: str
    triton: str | None
    command: str
    version: str | None = None
    detail: str | None = None
    ms: float | None = None
    ms_p10: float | None = None
    ms_p90: float | None = None
    rounds: int = 0
    ratio_to_bare: float | None = None
    ratio_to_eager: float | None = None
    tflops: float | None = None
    extra_gib: float | None = None
    logprob_err: float | None = None
    grad_err: float | None = None

    @property
    def cell(self) -> tuple[str, int, int, int, str, str, str]:
        """What was measured, whoever did it."""
        return self.case, self.T, self.H, self.V, self.inputs, self.dtype, self.card

    @property
    def key(self) -> tuple[object, ...]:
        """A second record with this key is a repetition."""
        return *self.cell, self.impl


def save(records: Iterable[Record], path: Path) -> None:
    """Write them, whole or not at all: a run that is killed leaves those of the cases before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text("[\n" + ",\n".join(json.dumps(asdict(record)) for record in records) + "\n]\n")
    unfinished.replace(path)


def load(path: Path) -> list[Record]:
    """Read what :func:`save` wrote."""
    return [Record(**fields) for fields in json.loads(path.read_text())]


def merge(parts: Iterable[Iterable[Record]]) -> list[Record]:
    """One record for each key: a later one replaces an earlier one, in its place, unless nothing was tried later."""
    merged: dict[tuple[object, ...], Record] = {}
    for part in parts:
        for record in part:
            if record.key not in merged or record.status not in NOT_TRIED:
                merged[record.key] = record
    return list(merged.values())
