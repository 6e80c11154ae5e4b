"""Learns the quickstart's task many times: python -m benchmarks.learning [--algos ...] [--staleness ...] [--seeds ...]

Every algorithm, synchronous and one step off-policy, from the same starting checkpoint of each seed, judged on all
4,096 held-out problems. Runs that are in the folder already are not repeated. Writes
benchmarks/results/learning-cpu.json (a record a run), docs/learning.png (mean curves of the seeds), and prints tables.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "learning-cpu.json"
PICTURE = ROOT / "docs" / "learning.png"
ALGORITHMS = ("ppo", "rloo", "grpo", "online_dpo", "bok")
COMMON = "--config configs/quickstart.yaml --eval.prompts 4096 --eval.every_steps 30"
OWN = {"online_dpo": "--train.learning_rate 1e-4 --train.minibatches_per_batch 1"}
"""Options of single algorithms. Four DPO steps a batch at the quickstart's rate, each on a quarter of its pairs, first
lose accuracy: seed 0 fell from 38 to 27 % in 30 steps, one step off-policy to 11 %."""


def machine() -> str:
    """The processor's name and the number of cores."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    names = [line.split(":")[1].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def run(algo: str, staleness: int, backend: str, seed: int, folder: Path, threads: int) -> dict[str, Any]:
    """One run of the engine, or what an earlier one left; its record."""
    name = f"{algo}-staleness{staleness}-{backend}-seed{seed}"
    options = f"--algo {algo} --schedule.staleness {staleness} --generation.backend {backend} --seed {seed}"
    options += f" {OWN[algo]}" if algo in OWN else ""
    if not (folder / name / "summary.json").exists():
        command = [sys.executable, "-m", "engine.run", *f"{COMMON} {options} --live false".split()]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        where = ["--output_dir", str(folder), "--name", name]
        done = subprocess.run([*command, *where], cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return {
        **json.loads((folder / name / "summary.json").read_text()),
        "staleness": staleness,
        "curve": [[row["step"], row["eval/accuracy"]] for row in rows if "eval/accuracy" in row],
        "machine": machine(),
        "command": f"python -m engine.run {COMMON} {options}",
    }


def by_setting(records: list[dict[str, Any]]) -> dict[tuple[str, str, int], list[dict[str, Any]]]:
    """The seeds of each algorithm, sampler and staleness."""
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = defaultdict(list)
    for one in records:
        groups[one["algo"], one["generation_backend"], one["staleness"]].append(one)
    return dict(sorted(groups.items(), key=lambda item: (ALGORITHMS.index(item[0][0]), *item[0][1:])))


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: a row a setting, means over its seeds, with each seed's gain."""
    lines = ["| algorithm | sampler | staleness | before | after | each seed | points |", "|---" * 7 + "|"]
    for (algo, backend, staleness), seeds in by_setting(records).items():
        before, after = (statistics.mean(one[f"accuracy_{when}"] for one in seeds) for when in ("before", "after"))
        each = ", ".join(f"{one['accuracy_after']:.1%}" for one in sorted(seeds, key=lambda one: one["seed"]))
        lines.append(
            f"| {algo} | {backend} | {staleness} | {before:.1%} | {after:.1%} | {each} | "
            f"{100 * (after - before):+.1f} |"
        )
    return "\n".join(lines)


def draw(records: list[dict[str, Any]]) -> None:
    """Held-out accuracy over training, a panel an algorithm, mean of the seeds; transformers' sampler."""
    from matplotlib.figure import Figure

    from engine.report import figures
    from engine.report.curves import Series

    groups = {key: seeds for key, seeds in by_setting(records).items() if key[1] == "hf"}
    algos = list(dict.fromkeys(algo for algo, *_ in groups))
    figure = Figure(figsize=(2.6 * len(algos), 2.8), layout="constrained", dpi=150)
    panels = figure.subplots(1, len(algos), sharey=True, squeeze=False)[0]
    for panel, name in zip(panels, algos, strict=True):
        for (algo, _, staleness), seeds in groups.items():
            if algo == name:
                curves = [dict(one["curve"]) for one in seeds]
                steps = sorted(set.intersection(*(set(curve) for curve in curves)))
                means = [100 * statistics.mean(curve[step] for curve in curves) for step in steps]
                label = f"staleness {staleness} ({len(seeds)} seeds)"
                points = list(zip(steps, means, strict=True))
                figures.plot(panel, Series(label, points, f"c{staleness}", exact=True))
        figures.dress(panel, name)
        panel.set_xlabel("step", fontsize=8)
        panel.legend(frameon=False, fontsize=7, loc="lower right")
    panels[0].set_ylabel("held-out problems right, %", fontsize=8)
    figure.savefig(PICTURE)


def main() -> None:
    """Runs, keeps, and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algos", nargs="+", choices=ALGORITHMS, default=ALGORITHMS)
    parser.add_argument("--staleness", nargs="+", type=int, choices=(0, 1), default=(0, 1))
    parser.add_argument("--backends", nargs="+", choices=("hf", "vllm"), default=("hf",))
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "learning", help="where the runs go")
    options = parser.parse_args()
    threads = max(1, (os.cpu_count() or 1) // options.jobs)
    wanted = list(itertools.product(options.seeds, options.backends, options.algos, options.staleness))
    new: list[dict[str, Any]] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = [pool.submit(run, algo, s, backend, seed, options.folder, threads) for seed, backend, algo, s in wanted]
        for number, one in enumerate(runs, 1):
            new.append(one.result())
            print(f"{number}/{len(runs)}  {new[-1]['command']}  {new[-1]['accuracy_after']:.1%}", flush=True)
    records = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    replaced = {one["command"] for one in new}
    records = [one for one in records if one["command"] not in replaced] + new
    RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n")
    draw(records)
    print(table(records))


if __name__ == "__main__":
    main()
