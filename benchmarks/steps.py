"""Measures whole training steps beside TRL's: python -m benchmarks.steps [--only SETTING] [--steps N]

GRPO on one GPU on random weights of Qwen2-1.5B's shape in bf16, with a reference model and one optimizer step for each
batch of 256 responses of up to 512 tokens. In all settings vLLM samples in the training process, on the same GPU. With
the engine it sleeps while training where the memory plan says so; with "trl" always, with "trl-awake" never, which is
TRL's default. "trl-bf16" trains bf16 weights without an fp32 copy, where "trl" has fp32 weights and bf16 autocast, the
default: less work, and less exact. TRL's attention is sdpa: flash-attn is not installed. What has no option in a
command is the default of either side. What a run writes to its metrics.jsonl becomes records in
benchmarks/results/steps-h100.json, which replace earlier ones of the same setting; a table goes to the terminal.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from benchmarks.runs import Benchmark, Rows, card, run_steps

RESPONSES = 256
"""A step, on either side."""
TRL = (
    "--num_generations 4 --max_completion_length 512 --beta 0.04 --epsilon 0.2 --learning_rate 1e-6 --bf16 true "
    "--max_steps 100000 --logging_steps 1 --save_strategy no --report_to none"
)
VLLM = "--use_vllm true --vllm_mode colocate --vllm_gpu_memory_utilization 0.15 --vllm_max_model_length 640"
"""On a GPU of 80 GiB or more that leaves room for the KV cache of all responses, about 4.4 GiB."""
SLEEP = "--vllm_enable_sleep_mode true"
SETTINGS = {
    "tandem": "--algo grpo --launch.ranks 1 --kl.coef 0.04 --kl.estimator k3 --train.minibatches_per_batch 1",
    "trl": f"""{SLEEP} --model_init_kwargs '{{"attn_implementation": "sdpa"}}'""",
    "trl-awake": """--model_init_kwargs '{"attn_implementation": "sdpa"}'""",
    "trl-bf16": f"""{SLEEP} --model_init_kwargs '{{"attn_implementation": "sdpa", "dtype": "bfloat16"}}'""",
}
UNITS = {
    "step_s": "s",
    "sampling_s": "s",
    "response_tokens_per_second": "tokens/s",
    "response_tokens_mean": "tokens",
    "gap_mean_nats": "nats",
    "peak_gib": "GiB",
}


def metrics(rows: Rows) -> dict[str, float]:
    """Medians over a run's steps but the first two, which compile and allocate; of the memory the most of all steps.

    ``sampling_s`` has the hand-over of weights, waking up and falling asleep in it.
    """
    later = rows[2:] or rows
    names = {
        "step_s": "time/step",
        "sampling_s": "time/sampling",
        "response_tokens_per_second": "response_tokens_per_second",
        "response_tokens_mean": "rollout/response_tokens_mean",
        "gap_mean_nats": "weights/logprob_gap_mean",
    }
    values = {name: [row[key] for row in later if key in row] for name, key in names.items()}
    found = {name: statistics.median(some) for name, some in values.items() if some}
    if "memory/driver_gib" in rows[-1]:
        found["peak_gib"] = rows[-1]["memory/driver_gib"]
    return found


class Steps(Benchmark):
    """The engine's runs and TRL's."""

    def parser(self) -> argparse.ArgumentParser:
        """With what only TRL needs."""
        parser = super().parser()
        batches = [2**power for power in range(2, 9)]
        parser.add_argument(
            "--trl-batch", type=int, choices=batches, default=32, help="responses in a forward pass of TRL's"
        )
        parser.add_argument("--trl-more", default="", help="more options of TRL's GRPOConfig")
        return parser

    def command(self, setting: str, options: argparse.Namespace) -> str:
        """Responses of a small run are short. On a CPU TRL samples with transformers."""
        if setting == "tandem":
            command = super().command(setting, options)
            return f"{command} --rollout.max_response_tokens 16" if options.small else command
        batch = f"--per_device_train_batch_size {options.trl_batch}"
        batch += f" --gradient_accumulation_steps {RESPONSES // options.trl_batch}"
        sampler = "--use_vllm false --use_cpu true" if card() == "no GPU" else VLLM
        short = "--max_completion_length 16" if options.small else ""
        given = f"{TRL} {batch} {sampler} {self.settings[setting]} {short} {options.trl_more}"
        return f"python -m benchmarks.trl_grpo --folder MODEL {' '.join(given.split())}"

    def output(self, setting: str, runs: Path) -> list[str]:
        """As either side calls it."""
        return super().output(setting, runs) if setting == "tandem" else ["--output_dir", str(runs / setting)]

    def versions(self) -> dict[str, str]:
        """TRL's and what it stands on, too."""
        return super().versions() | {package: version(package) for package in ("trl", "accelerate")}

    def rows(self, arguments: list[str], run: Path, steps: int) -> Rows:
        """With the driver's memory, and in the engine's steps what TRL's have."""
        with polled_memory() as seen:
            rows = run_steps(arguments, run, steps)
        return [complete(row) | ({"memory/driver_gib": max(seen)} if seen else {}) for row in rows]


def complete(row: dict[str, float]) -> dict[str, float]:
    """One of the engine's steps with the sums that TRL's have already."""
    sampling = sum(row.get(f"time/{phase}", 0.0) for phase in ("generate", "sleep", "sync", "offload"))
    tokens = row["rollout/response_tokens_mean"] * RESPONSES / row["time/step"]
    return {"time/sampling": sampling, "response_tokens_per_second": tokens} | row


@contextlib.contextmanager
def polled_memory() -> Iterator[list[float]]:
    """GiB in use on the fullest visible GPU, twice a second while the driver answers, from a run's start to its end."""
    seen: list[float] = []
    ended = threading.Event()
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={visible}")

    def poll() -> None:
        while not ended.wait(0.5):
            answer = subprocess.run(command, capture_output=True, text=True)
            if answer.returncode == 0:
                seen.append(max(map(float, answer.stdout.split())) / 1024)

    if card() == "no GPU":
        yield seen
        return
    with ThreadPoolExecutor(1) as thread:
        thread.submit(poll)
        try:
            yield seen
        finally:
            ended.set()


BENCHMARK = Steps(
    description=__doc__,
    settings=SETTINGS,
    units=UNITS,
    metrics=metrics,
    results=Path(__file__).resolve().parent / "results" / "steps-h100.json",
)

if __name__ == "__main__":
    BENCHMARK.main()
