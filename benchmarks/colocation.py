"""Measures runs that train and sample on the same GPUs: python -m benchmarks.colocation [--only SETTING] [--steps N]

PPO on random weights of Qwen2-1.5B's shape in bf16, 256 responses of up to 512 tokens a step, started as a user would
start it. What a run writes to its metrics.jsonl becomes records in benchmarks/results/colocation-h100.json, which
replace earlier ones of the same setting; a table goes to the terminal.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.runs import Benchmark, Rows

SETTINGS = {
    "zero2-1gpu": "--algo ppo --launch.ranks 1 --train.zero_stage 2 --memory.sleep level2 --memory.zero_copy off",
    "zero2-2gpu": "--algo ppo --launch.ranks 2 --train.zero_stage 2 --memory.sleep level2 --memory.zero_copy off",
    "zero3-2gpu": "--algo ppo --launch.ranks 2 --train.zero_stage 3 --memory.sleep level2",
    "zerocopy-1gpu": "--algo ppo --launch.ranks 1 --train.zero_stage 2 --memory.sleep kv --memory.zero_copy auto",
}
UNITS = {
    "handover_cycle_s": "s",
    "handover_share": "share of a step",
    "digest_s": "s",
    "offload_s": "s",
    "step_s": "s",
    "gap_mean_nats": "nats",
    "gap_p999_nats": "nats",
    "plan_error": "share of the plan",
    "asleep_growth": "share of cycle 2",
    "asleep_gib": "GiB",
    "generate_gib": "GiB",
    "train_gib": "GiB",
    "peak_gib": "GiB",
}


def metrics(rows: Rows) -> dict[str, float]:
    """One number for each metric from a run's steps. The first step, which compiles and allocates, gives no times."""
    later = rows[1:] or rows
    cycles = [row["time/sleep"] + row["time/sync"] for row in later]
    errors = [value for row in later for name, value in row.items() if name.startswith("memory/plan_error_")]
    found = {
        "handover_cycle_s": statistics.median(cycles),
        "handover_share": statistics.median(c / row["time/step"] for c, row in zip(cycles, later, strict=True)),
        "digest_s": statistics.median(row["time/digest"] for row in later),
        "step_s": statistics.median(row["time/step"] for row in later),
        "gap_mean_nats": max(row["weights/logprob_gap_mean"] for row in rows),
        "gap_p999_nats": max(row["weights/logprob_gap_p999"] for row in rows),
        "peak_gib": max(row["memory/peak_gib"] for row in rows),
    }
    for phase in ("generate", "train"):
        if f"memory/{phase}_gib" in rows[-1]:
            found[f"{phase}_gib"] = max(row[f"memory/{phase}_gib"] for row in rows)
    if errors:
        found["plan_error"] = max(errors, key=abs)
    if "memory/asleep_gib" in rows[-1]:
        found["asleep_gib"] = rows[-1]["memory/asleep_gib"]
        found["asleep_growth"] = max((row["memory/asleep_growth"] for row in rows), key=abs)
    if "time/offload" in rows[-1]:
        found["offload_s"] = statistics.median(row["time/offload"] for row in later)
    return found


BENCHMARK = Benchmark(
    description=__doc__,
    settings=SETTINGS,
    units=UNITS,
    metrics=metrics,
    results=Path(__file__).resolve().parent / "results" / "colocation-h100.json",
)

if __name__ == "__main__":
    BENCHMARK.main()
