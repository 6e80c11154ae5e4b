"""Measures what generating ahead is worth: python -m benchmarks.schedules [--only SETTING] [--steps N]

RLOO on random weights of Qwen2-1.5B's shape in bf16, 256 responses of up to 512 tokens a step, on two GPUs: one trains
and one generates, in turns and one batch ahead; and both do both. What a run writes to its metrics.jsonl becomes
records in benchmarks/results/async-h100.json, which replace earlier ones of the same setting; a table goes to the
terminal.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.runs import Benchmark, Rows

RANKS = "--algo rloo --launch.ranks 2"
SETTINGS = {
    "split-staleness0": f"{RANKS} --schedule.placement split --schedule.staleness 0",
    "split-staleness1": f"{RANKS} --schedule.placement split --schedule.staleness 1",
    "colocated-2gpu": f"{RANKS} --train.zero_stage 2",
}
UNITS = {
    "step_s": "s",
    "idle_train": "share of a step",
    "idle_generate": "share of the time between two batches",
    "tokens_per_second": "tokens/s",
    "staleness": "updates",
    "gap_mean_nats": "nats",
}


def metrics(rows: Rows) -> dict[str, float]:
    """Medians over a run's steps but the first two, which compile, allocate, and fill the pipe."""
    later = rows[2:] or rows
    names = {
        "step_s": "time/step",
        "idle_train": "idle/train",
        "idle_generate": "idle/generate",
        "tokens_per_second": "tokens_per_second",
        "staleness": "off_policy/staleness",
        "gap_mean_nats": "weights/logprob_gap_mean",
    }
    values = {name: [row[key] for row in later if key in row] for name, key in names.items()}
    return {name: statistics.median(found) for name, found in values.items() if found}


BENCHMARK = Benchmark(
    description=__doc__,
    settings=SETTINGS,
    units=UNITS,
    metrics=metrics,
    results=Path(__file__).resolve().parent / "results" / "async-h100.json",
)

if __name__ == "__main__":
    BENCHMARK.main()
