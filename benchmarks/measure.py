"""One case: every implementation checked, its memory taken, and all of them timed side by side."""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.competitors import BARE, COMPETITORS, CORE, EAGER, OURS, Outcome, Run
from benchmarks.guard import Failure, attempt, release
from benchmarks.inputs import Exact, exact, make_gae_inputs, make_inputs
from benchmarks.memory import cpu_extra_gib, cuda_extra_gib
from benchmarks.records import Record
from benchmarks.timing import CpuClock, CudaClock, Times, interleave, median_ratio, quantile

PAIRS = {"cuda": (BARE, OURS), "cpu": (EAGER, OURS)}
"""The ratio that there are targets for."""
INPUT_SETS = 2
COMPETITOR_SECONDS = 3.0
"""Of measured time on a GPU; a slower one takes part in fewer rounds."""


@dataclass
class Setup:
    """What holds for every case of a run."""

    device: str
    command: str
    implementations: Sequence[str]
    deadline: float
    """time.monotonic() after which nothing is begun but the core."""
    case_seconds: float
    """Competitors of the core may compile and warm up for so long; those that are left are not measured."""

    def describe(self, case: Case, name: str) -> dict[str, Any]:
        """A record's fields that do not depend on the measurement."""
        return {
            "case": case.name,
            "impl": name,
            "T": case.T,
            "H": case.H,
            "V": case.V,
            "inputs": case.inputs,
            "dtype": case.dtype,
            "live_rows": case.live_rows,
            "workspace_gib": case.kind.workspace_gib if name == OURS and case.V else None,
            "version": COMPETITORS[name].version(),
            "card": torch.cuda.get_device_name() if self.device == "cuda" else cpu_name(),
            "torch": torch.__version__,
            "triton": _version("triton"),
            "command": self.command,
        }


@dataclass
class Finding:
    """What the first calls of an implementation told."""

    run: Run
    extra_gib: float | None = None
    logprob_err: float | None = None
    grad_err: float | None = None


def measure(case: Case, setup: Setup) -> list[Record]:
    """One record for each implementation that has to do with the case, failures among them."""
    release()
    make: Callable[..., Any] = make_gae_inputs if case.name == "gae" else make_inputs
    sets = [make(case, setup.device, seed=0)]
    more = {} if case.name == "gae" else {"like": sets[0]}
    sets += [make(case, setup.device, seed=seed, **more) for seed in range(1, INPUT_SETS)]
    truth = None if case.name in ("gae", "kl") else exact(case, sets[0])

    findings: dict[str, Finding | Failure] = {}
    names = [name for name in setup.implementations if case.name in COMPETITORS[name].cases]
    deadline = setup.deadline
    for name in sorted(names, key=lambda name: name not in CORE):
        if name in CORE:
            deadline = min(setup.deadline, time.monotonic() + setup.case_seconds)
        elif time.monotonic() > deadline:
            findings[name] = Failure("no time", "the time for competitors was used up")
            continue
        findings[name] = attempt(partial(examine, case, name, setup.device, sets[0], truth))
        release()

    runs = {name: found.run for name, found in findings.items() if isinstance(found, Finding)}
    calls = {name: rotate(run, sets) for name, run in runs.items()}
    clock = CudaClock() if setup.device == "cuda" else CpuClock()
    condition = calls.get(BARE) if setup.device == "cuda" else None
    seconds = COMPETITOR_SECONDS if setup.device == "cuda" else math.inf
    times, failures = interleave(calls, clock, pair=PAIRS[setup.device], condition=condition, seconds=seconds)
    findings.update(failures)
    return [record(case, name, setup, found, times) for name, found in findings.items()]


def rotate(run: Run, sets: Sequence[Any]) -> Callable[[int], Outcome]:
    """The call of a round, with other inputs than in the round before."""
    return lambda index: run(sets[index % len(sets)])


def examine(case: Case, name: str, device: str, inputs: Any, truth: Exact | None) -> Finding:
    """Compile and warm up, then take memory and errors from the next call."""
    entry = COMPETITORS[name]
    run = entry.prepare(case, inputs)
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    outcome = run(inputs)
    finding = Finding(run)
    if name not in (BARE, "bare-whole"):  # their buffers are there before
        if device == "cuda":
            del outcome
            outcome, finding.extra_gib = cuda_extra_gib(lambda: run(inputs), before)
        else:
            finding.extra_gib = cpu_extra_gib(case, name)
        if truth is not None:
            judge(finding, name, outcome, inputs, truth)
    return finding


def judge(finding: Finding, name: str, outcome: Outcome, inputs: Any, truth: Exact) -> None:
    """Errors against fp64; one of a probe's own leaves its implementation's times alone."""
    if outcome.logprobs is not None:
        logprobs: Tensor | Failure | None = outcome.logprobs[truth.rows]
    else:
        logprobs = attempt(lambda: COMPETITORS[name].probe(inputs, truth.rows))
    if isinstance(logprobs, Tensor):
        finding.logprob_err = truth.logprob_error(logprobs)
    if outcome.gradients:
        finding.grad_err = truth.gradient_error(outcome.gradients[0])


def record(case: Case, name: str, setup: Setup, found: Finding | Failure, times: Times) -> Record:
    """The measurement, or why there is none."""
    fields = setup.describe(case, name)
    if isinstance(found, Failure):
        return Record(**fields, status=found.status, detail=found.detail)
    taken = [value for value in times[name] if value is not None]
    ms = statistics.median(taken)
    return Record(
        **fields,
        status="ok",
        ms=ms,
        ms_p10=quantile(taken, 0.1),
        ms_p90=quantile(taken, 0.9),
        rounds=len(taken),
        ratio_to_bare=median_ratio(times[name], times.get(BARE)),
        ratio_to_eager=median_ratio(times[name], times.get(EAGER)),
        tflops=case.flops / ms / 1e9 if case.flops else None,
        extra_gib=found.extra_gib,
        logprob_err=found.logprob_err,
        grad_err=found.grad_err,
    )


def cpu_name() -> str:
    """The processor and the threads that torch uses of it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} threads"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
