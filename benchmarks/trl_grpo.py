"""GRPO with TRL 1.16 for benchmarks.steps: python -m benchmarks.trl_grpo --folder MODEL [options of TRL's GRPOConfig]

Writes metrics.jsonl to the output folder, with the engine's names for what both measure: a line a step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from runpy import run_path
from typing import Any

import torch
from datasets import Dataset
from transformers import HfArgumentParser, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


@dataclass
class Inputs:
    """Options beside TRL's own."""

    folder: Path = field(metadata={"help": "of benchmarks.runs.make_inputs: model, tokenizer, prompts and reward"})


class TimedTrainer(GRPOTrainer):
    """Notes how long it samples: hand-over of weights, waking up, sampling, falling asleep."""

    sampling_seconds = 0.0

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        started = now()
        found: Any = super()._generate_single_turn(*args, **kwargs)
        self.sampling_seconds = now() - started
        return found


class Recorder(TrainerCallback):
    """Writes a line for each optimizer step: seconds from the end of the step before to its own."""

    def __init__(self, log: Path, responses: int, sampling: Callable[[], float]) -> None:
        self._log, self._responses, self._sampling = log, responses, sampling
        self._ended = self._seconds = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """The first step begins."""
        self._ended = now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """After the optimizer's step."""
        ended = now()
        self._seconds, self._ended = ended - self._ended, ended

    def on_log(self, *_: Any, **given: Any) -> None:
        """Right after each step, with ``--logging_steps 1``."""
        logs = given["logs"]
        if "completions/mean_length" not in logs:  # a summary of the whole run
            return
        length = logs["completions/mean_length"]
        row = {
            "time/step": self._seconds,
            "time/sampling": self._sampling(),
            "rollout/response_tokens_mean": length,
            "response_tokens_per_second": length * self._responses / self._seconds,
        }
        if "sampling/sampling_logp_difference/mean" in logs:
            row["weights/logprob_gap_mean"] = logs["sampling/sampling_logp_difference/mean"]
        with self._log.open("a") as file:
            file.write(json.dumps(row) + "\n")


def now() -> float:
    """Seconds, once the GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    """Trains until it is ended."""
    kinds: Any = (Inputs, GRPOConfig)
    inputs, config = HfArgumentParser(kinds).parse_args_into_dataclasses()
    odd = run_path(str(inputs.folder / "odd.py"))["odd"]
    prompts = [json.loads(line) for line in (inputs.folder / "prompts.jsonl").read_text().splitlines()]
    trainer = TimedTrainer(
        model=str(inputs.folder),
        reward_funcs=odd,
        args=config,
        train_dataset=Dataset.from_list(prompts),
        processing_class=PreTrainedTokenizerFast.from_pretrained(inputs.folder, padding_side="left"),
    )
    output = Path(config.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    trainer.add_callback(
        Recorder(output / "metrics.jsonl", config.generation_batch_size, lambda: trainer.sampling_seconds)
    )
    trainer.train()


if __name__ == "__main__":
    main()
