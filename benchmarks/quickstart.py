"""Collects finished quickstart runs into a table: python -m benchmarks.quickstart RUN_FOLDER... > table.md

Writes benchmarks/results/quickstart-cpu.json beside it: one record a run, its summary.json with the machine.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results" / "quickstart-cpu.json"


def machine() -> str:
    """The processor's name and the number of cores."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    names = [line.split(":")[1].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def main(folders: list[str]) -> None:
    """Prints the table, sorted by algorithm and seed."""
    runs = [json.loads((Path(folder) / "summary.json").read_text()) for folder in folders]
    runs.sort(key=lambda run: (run["algo"], run["seed"]))
    command = "python -m engine.run --algo ALGO --config configs/quickstart.yaml --seed SEED"
    RESULTS.write_text(json.dumps([{**run, "machine": machine(), "command": command} for run in runs], indent=1) + "\n")
    print("| algorithm | seed | held-out accuracy before | after | points | seconds | tokens/s |")
    print("|---|---|---|---|---|---|---|")
    for run in runs:
        before, after = run["accuracy_before"], run["accuracy_after"]
        print(
            f"| {run['algo'].upper()} | {run['seed']} | {before:.1%} | {after:.1%} | {100 * (after - before):+.1f} | "
            f"{run['seconds']:.0f} | {run['tokens_per_second']:,.0f} |"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
