"""Runs two commits of Tandem on the same small runs and compares what came out, bit for bit.

    python -m scripts.compare_commits main my-branch --jobs 2 --keep FOLDER
    python -m scripts.compare_commits main main --only 'ppo-*'     # which runs are reproducible at all
    python -m scripts.compare_commits main --keep FOLDER           # only keeps main's results, for later

For a change that is to change no run: every algorithm with both samplers on three schedules, ZeRO-3 on two ranks, LoRA,
and a run that is killed and resumed. Compared are the token ids of every response, samples.jsonl, all metrics but those
of ``NOT_COMPARED``, and the bytes of the exported model. Runs are started through the public command line alone, on the
CPU, in a git worktree of the commit, each in a fork of a process that has imported no more than libraries; all commits
read the same inputs. The exit status is 1 if anything differs or a run fails. Kept results hold for one machine and one
set of installed packages.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from itertools import zip_longest
from pathlib import Path
from typing import Any

from scripts import forked_runs
from scripts.forked_runs import Plan
from scripts.small_runs import COMMON, IMPORTS, Run, make_inputs, matrix

ROOT = Path(__file__).resolve().parents[1]
NOT_COMPARED = {
    "time/*": "seconds",
    "tokens_per_second": "a rate",
    "rollout/generate_seconds": "seconds",
    "idle/*": "shares of seconds",
    "memory/*": "on a CPU the process's size, which depends on the allocator and on what else runs",
}
"""Metrics that two runs of one and the same commit do not share, by pattern, and why."""
TIMEOUT = 300.0
"""Seconds that one run may take."""

Result = dict[str, Any]
"""Of a run: ``tokens`` by rank, ``samples`` and ``metrics`` by line, ``model`` as a hash by file; or ``failed``."""


def hashes(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file below a folder, by its path in there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def collect(folder: Path) -> Result:
    """What is compared of a finished run: the reward's notes in ``tokens``, and the run folder ``run``."""
    run = folder / "run"
    return {
        "tokens": {path.stem: _lines(path) for path in sorted((folder / "tokens").iterdir())},
        "samples": _lines(run / "samples.jsonl"),
        "metrics": _lines(run / "metrics.jsonl"),
        "model": hashes(run / "model"),
    }


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def differences(a: Result, b: Result) -> list[str]:
    """What differs between two results, the first of each kind; empty if they are equal."""
    if failed := {f"failed: {result['failed']}": None for result in (a, b) if "failed" in result}:
        return list(failed)
    found = [_first_metric(a["metrics"], b["metrics"])]
    for rank in sorted(a["tokens"].keys() | b["tokens"].keys()):
        found.append(_first_row(f"tokens of {rank}", a["tokens"].get(rank, []), b["tokens"].get(rank, [])))
    found.append(_first_row("samples.jsonl", a["samples"], b["samples"]))
    files = sorted(a["model"].keys() | b["model"].keys())
    if other := [name for name in files if a["model"].get(name) != b["model"].get(name)]:
        found.append(f"model: {', '.join(other)}")
    return [one for one in found if one]


def compared(metric: str) -> bool:
    """Whether equal runs share this metric."""
    return not any(fnmatch(metric, pattern) for pattern in NOT_COMPARED)


def _first_metric(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> str | None:
    """The first metric that differs, by step and then by its place in the file."""
    for row, other in zip_longest(a, b, fillvalue={}):
        for name in [*row, *(name for name in other if name not in row)]:
            here, there = row.get(name, "absent"), other.get(name, "absent")
            if compared(name) and here != there:
                return f"{name} at step {row.get('step', other.get('step'))}: {here} and {there}"
    return None


def _first_row(what: str, a: Sequence[Any], b: Sequence[Any]) -> str | None:
    for number, (row, other) in enumerate(zip_longest(a, b, fillvalue="absent"), 1):
        if row != other:
            return f"{what}, line {number}: {_short(row)} and {_short(other)}"
    return None


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else text[:157] + "..."


@contextlib.contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[Path]:
    """The files of a commit with its C++ kernels: this checkout's, where they are built from the same files."""
    _git("worktree", "add", "--detach", "--quiet", str(folder), commit)
    try:
        built = sorted((ROOT / "kernels").glob("_cpu*.so"))
        if built and _sources(ROOT) == _sources(folder):
            for path in built:
                shutil.copy2(path, folder / "kernels")
        else:
            print(f"building the C++ kernels of {commit[:12]}", flush=True)
            command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
            build = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            if build.returncode or not list(folder.rglob("_cpu*.so")):  # a compiler's failure alone fails no build
                sys.exit(f"error: the C++ kernels of {commit} do not build:\n{build.stderr[-3000:]}")
        yield folder
    finally:
        _git("worktree", "remove", "--force", str(folder))


def _sources(checkout: Path) -> tuple[dict[str, str], bytes]:
    """What the C++ kernels are built from."""
    return hashes(checkout / "csrc" / "cpu"), (checkout / "setup.py").read_bytes()


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def results_of(commit: str, label: str, runs: Sequence[Run], inputs: Path, options: argparse.Namespace) -> list[Result]:
    """The results of a commit, one a run: those that are kept of the same inputs and options, the others made now."""
    kept, files = options.keep / label, hashes(inputs)
    kept.mkdir(parents=True, exist_ok=True)
    about = {run: {"inputs": files, "options": COMMON | dict(run.options), "threads": options.threads} for run in runs}
    done: dict[Run, Result] = {}
    for run in runs:
        path = kept / f"{run.name}.json"
        if path.exists() and (found := json.loads(path.read_text(encoding="utf-8")))["about"] == about[run]:
            done[run] = found
    waiting = [run for run in runs if run not in done]
    print(f"{label}: {len(waiting)} run(s) to do, {len(done)} kept", flush=True)
    if waiting:
        started = time.perf_counter()
        with checked_out(commit, inputs.parent / label) as checkout:
            for run, result in _each(waiting, checkout, inputs, options):
                done[run] = result
                failed = result["failed"].splitlines()[0] if "failed" in result else ""
                print(f"  {len(done):2d}/{len(runs)} {run.name:18s} {result['seconds']:6.1f} s  {failed}", flush=True)
                if not failed:
                    text = json.dumps({"about": about[run], **result}, ensure_ascii=False)
                    (kept / f"{run.name}.json").write_text(text, encoding="utf-8")
        print(f"{label}: {time.perf_counter() - started:.0f} s, load {os.getloadavg()[0]:.1f}", flush=True)
    return [done[run] for run in runs]


def _each(
    runs: Sequence[Run], checkout: Path, inputs: Path, options: argparse.Namespace
) -> Iterator[tuple[Run, Result]]:
    """Runs them, some at a time; each with its result and seconds, as they end."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {key: value for key, value in os.environ.items() if key not in ranks} | {
        "OMP_NUM_THREADS": str(options.threads),
        "PYTHONHASHSEED": "0",  # peft writes a set: the names of the layers with an adapter
        "PYTHONPATH": str(checkout),
        "DS_ACCELERATOR": "cpu",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    for sampler, modules in IMPORTS.items():
        mine = {run.name: run for run in runs if run.options["generation.backend"] == sampler}
        if not mine:
            continue
        with tempfile.TemporaryDirectory(prefix="tandem-runs-") as folder:
            plan: Plan = {
                "jobs": [run.job(Path(folder) / name) for name, run in mine.items()],
                "at_a_time": options.jobs,
                "timeout": TIMEOUT,
                "imports": modules,
            }
            command = [sys.executable, "-P", forked_runs.__file__]
            with subprocess.Popen(
                command, cwd=inputs.parent, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            ) as forks:
                assert forks.stdin and forks.stdout
                forks.stdin.write(json.dumps(plan))
                forks.stdin.close()
                for line in forks.stdout:
                    ended = json.loads(line)
                    result = ended if ended["failed"] else collect(Path(folder) / ended["name"])
                    yield mine[ended["name"]], result | {"seconds": ended["seconds"]}
            if forks.returncode:
                sys.exit(f"error: {' '.join(command)} ended with status {forks.returncode}")


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; 0 if all runs are equal, 1 if any differs or fails."""
    options = _parser().parse_args(argv)
    runs = [run for run in matrix() if not options.only or any(fnmatch(run.name, one) for one in options.only)]
    if options.list:
        print("\n".join(run.name for run in runs))
        return 0
    if not runs or not 1 <= len(options.commits) <= 2:
        sys.exit("error: give one commit or two, and an --only that names a run of --list")
    commits = [_git("rev-parse", "--verify", f"{one}^{{commit}}") for one in options.commits]
    labels = [commits[0], *(one + "-again" * (one == commits[0]) for one in commits[1:])]
    with tempfile.TemporaryDirectory(prefix="tandem-compare-") as name:
        work = Path(name)
        options.keep = (options.keep or work / "results").absolute()
        inputs = make_inputs(work / "inputs")
        all_results = [results_of(*pair, runs, inputs, options) for pair in zip(commits, labels, strict=True)]
    status = 0
    for run, results in zip(runs, zip(*all_results, strict=True), strict=True):
        found = differences(results[0], results[-1])
        status = status or bool(found)
        print(f"{run.name:22s} {'; '.join(found) or 'equal' * (len(commits) == 2) or 'done'}")
    return int(status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.compare_commits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("commits", nargs="*", metavar="COMMIT", help="one or two; the same one twice is run twice")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="runs like PATTERN (repeat for more)")
    parser.add_argument("--list", action="store_true", help="print the runs' names and exit")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (default: 1)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="OMP_NUM_THREADS of each (default: 1)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep results here, and take those that are here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
