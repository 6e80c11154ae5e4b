"""Options of the benchmark suite, what is selected by them, and the report at the end."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from benchmarks.measure import Setup
    from benchmarks.records import Record

SKIPPED = "kernel benchmarks: run them with `pytest benchmarks --benchmark` (options: benchmarks/README.md)"
DEFAULT_OUT = "runs/benchmarks"
SECONDS = {"targets": 200.0, "all": 480.0}
RESULTS: pytest.StashKey[list[Any]] = pytest.StashKey()
OUTPUT: pytest.StashKey[Path] = pytest.StashKey()


def _shard(text: str) -> tuple[int, int]:
    from benchmarks.cases import parse_shard

    try:
        return parse_shard(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def pytest_addoption(parser: pytest.Parser) -> None:
    """All begin with --benchmark."""
    group = parser.getgroup("benchmark", "kernel benchmarks")
    group.addoption("--benchmark", action="store_true", help="measure (without it everything is skipped)")
    group.addoption(
        "--benchmark-cases",
        choices=SECONDS,
        default="targets",
        help="on a GPU: the shapes that have targets, or every shape (a CPU has one small set)",
    )
    group.addoption("--benchmark-shard", type=_shard, default=(1, 1), metavar="i/n", help="the i-th of n parts")
    group.addoption("--benchmark-impls", metavar="A,B", help="only these implementations")
    group.addoption("--benchmark-out", default=DEFAULT_OUT, metavar="DIR", help="where results go (%(default)s)")
    group.addoption(
        "--benchmark-seconds",
        type=float,
        help="after so long only tandem, bare and eager are measured (targets: 200, all: 480)",
    )
    group.addoption(
        "--benchmark-case-seconds",
        type=float,
        default=25,
        help="so long may competitors compile and warm up on one case (%(default)s)",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a case; one that is skipped without --benchmark, so that nothing heavy is imported."""
    if "case" not in metafunc.fixturenames:
        return
    config = metafunc.config
    if not config.getoption("benchmark", default=False):
        metafunc.parametrize("case", [pytest.param(None, marks=pytest.mark.skip(reason=SKIPPED), id="skipped")])
        return
    import torch

    from benchmarks.cases import everything, shard, small, targets

    if torch.cuda.is_available():
        cases = targets() if config.getoption("benchmark_cases") == "targets" else everything()
    else:
        cases = small()
    try:
        cases = shard(cases, *config.getoption("benchmark_shard"))
    except ValueError as error:
        raise pytest.UsageError(f"--benchmark-shard: {error}") from error
    metafunc.parametrize("case", cases, ids=[case.id for case in cases])


@pytest.fixture(scope="session")
def setup(request: pytest.FixtureRequest) -> Setup:
    """What holds for the whole run."""
    import torch

    from benchmarks.competitors import COMPETITORS, CORE
    from benchmarks.measure import Setup

    option = request.config.getoption
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = list(COMPETITORS if device == "cuda" else CORE)
    if option("benchmark_impls"):
        names = option("benchmark_impls").split(",")
        if unknown := set(names) - COMPETITORS.keys():
            raise pytest.UsageError(f"--benchmark-impls: {', '.join(unknown)}: not among {', '.join(COMPETITORS)}")
    return Setup(
        device,
        recorded_command([str(one) for one in request.config.invocation_params.args]),
        names,
        time.monotonic() + (option("benchmark_seconds") or SECONDS[option("benchmark_cases")]),
        option("benchmark_case_seconds"),
    )


def recorded_command(arguments: list[str]) -> str:
    """The command line without the folder of the results, which is a place on one machine."""
    kept = [
        one
        for before, one in zip(["", *arguments], arguments, strict=False)
        if before != "--benchmark-out" and not one.startswith("--benchmark-out")
    ]
    return " ".join(["pytest", *kept])


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest) -> list[Record]:
    """All records so far."""
    return request.config.stash.setdefault(RESULTS, [])


@pytest.fixture(scope="session")
def output(request: pytest.FixtureRequest, setup: Setup) -> Path:
    """The JSON file, named after what was selected."""
    index, count = request.config.getoption("benchmark_shard")
    cases = request.config.getoption("benchmark_cases") if setup.device == "cuda" else "cpu"
    part = f"-{index}-of-{count}" if count > 1 else ""
    path = Path(request.config.getoption("benchmark_out")) / f"kernels-{cases}{part}.json"
    request.config.stash[OUTPUT] = path
    return path


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The tables, and where they are."""
    records = config.stash.get(RESULTS, [])
    if not records:
        return
    from benchmarks.merge import write
    from benchmarks.tables import plain, report

    written = write(records, config.stash[OUTPUT])
    terminalreporter.section("kernel benchmarks")
    terminalreporter.write_line(report(records, plain))
    terminalreporter.write_line(f"\nwrote {' '.join(map(str, written))}")
