"""The targets of issue 3, held against records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.competitors import EAGER, OURS
from benchmarks.memory import GIB
from benchmarks.records import Record

GPU_RATIOS = {
    ("policy", 4096, 151936): 0.98,
    ("policy", 2048, 151936): 1.00,
    ("policy", 1024, 151936): 1.00,
    ("policy", 576, 49152): 1.10,
    ("policy-half-dead", 4096, 151936): 0.70,
    ("policy-half-dead", 2048, 151936): 0.72,
    ("policy-half-dead", 1024, 151936): 0.74,
    ("policy-small-workspace", 4096, 151936): 1.10,
    ("logprob", 4096, 151936): 0.97,
    ("logprob", 2048, 151936): 0.98,
    ("logprob", 1024, 151936): 1.02,
    ("dpo", 4096, 151936): 1.03,
    ("kl", 2048, 151936): 1.10,
}
"""Time over the time of the bare products, T=8192, flat inputs."""
CPU_SPEEDUPS = {
    ("policy", "bfloat16"): 1.3,
    ("policy", "float32"): 1.1,
    ("policy-half-dead", "bfloat16"): 1.6,
    ("policy-half-dead", "float32"): 1.6,
}
"""Time of eager over ours, T=512, H=576, V=49152."""
NO_GRADIENT_GIB = 64 / 1024
LOGPROB_ERROR = 1e-4
GRADIENT_ERROR = 2.0
"""Times eager's on flat inputs of the same shape."""
CPU_MEMORY = 1 / 8
"""Times eager's."""


@dataclass(frozen=True)
class Verdict:
    """A target and what was measured."""

    record: Record
    metric: str
    value: float | None
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether it is met; a measurement that is not there meets nothing."""
        if self.value is None:
            return False
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def verdicts(records: Iterable[Record]) -> list[Verdict]:
    """Of our records that there is a target for, in their order."""
    records = list(records)
    eager = {record.cell: record for record in records if record.impl == EAGER}
    found: list[Verdict] = []
    for record in records:
        if record.impl == OURS and record.V:
            found += _on_cpu(record, eager) if record.T == 512 else _on_gpu(record, eager)
    return found


def _on_gpu(record: Record, eager: dict[tuple[str, int, int, int, str, str, str], Record]) -> list[Verdict]:
    ratio = GPU_RATIOS.get((record.case, record.H, record.V)) if record.T == 8192 else None
    if ratio is None:
        return []
    found = [Verdict(record, "× bare", record.ratio_to_bare, ratio)] if record.inputs == "flat" else []
    if record.case == "logprob":
        found.append(Verdict(record, "extra GiB", record.extra_gib, NO_GRADIENT_GIB))
    elif record.case != "kl" and record.workspace_gib is not None:
        found.append(Verdict(record, "extra GiB", _workspace(record), record.workspace_gib))
    if record.case != "kl":
        found.append(Verdict(record, "logprob error", record.logprob_err, LOGPROB_ERROR))
    flat = eager.get((record.case, *record.cell[1:4], "flat", *record.cell[5:]))
    if record.case.startswith("policy") and flat is not None and flat.grad_err:
        error = None if record.grad_err is None else record.grad_err / flat.grad_err
        found.append(Verdict(record, "grad error ÷ eager's", error, GRADIENT_ERROR))
    return found


def _workspace(record: Record) -> float | None:
    """Extra memory without an fp32 accumulator for dW, which DESIGN.md counts as dW, where one was there."""
    accumulator = 4 * record.V * record.H / GIB
    if record.extra_gib is None or record.workspace_gib is None or record.extra_gib <= record.workspace_gib:
        return record.extra_gib
    return max(0.0, record.extra_gib - accumulator)


def _on_cpu(record: Record, eager: dict[tuple[str, int, int, int, str, str, str], Record]) -> list[Verdict]:
    speedup = CPU_SPEEDUPS.get((record.case, record.dtype))
    if speedup is None:
        return []
    ratio = record.ratio_to_eager
    found = [Verdict(record, "speed-up over eager", 1 / ratio if ratio else None, speedup, at_least=True)]
    theirs = eager.get(record.cell)
    if theirs is not None and theirs.extra_gib and record.extra_gib is not None:
        found.append(Verdict(record, "extra memory ÷ eager's", record.extra_gib / theirs.extra_gib, CPU_MEMORY))
    return found
