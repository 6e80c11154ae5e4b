"""Whole runs as measurements: a made-up model of real size, one run a setting, a record a metric."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.run_folder.summary import versions

Rows = list[dict[str, float]]
"""Of metrics.jsonl: one a training step."""
COMMON = (
    "--model.dtype bfloat16 --generation.backend vllm --rollout.prompts_per_step 64 --rollout.samples_per_prompt 4 "
    "--rollout.max_prompt_tokens 128 --rollout.max_response_tokens 512 --train.learning_rate 1e-6 "
    "--train.tokens_per_microbatch 16384 --train.steps 100000"
)
"""256 responses of up to 512 tokens a step."""


@dataclass(frozen=True)
class Benchmark:
    """Settings that are measured against each other."""

    description: str
    settings: dict[str, str]
    """Options by name, on top of those that all have: of engine.run ``COMMON``."""
    units: dict[str, str]
    """Unit of each metric, in the table's order."""
    metrics: Callable[[Rows], dict[str, float]]
    """One number for each metric from a run's steps."""
    results: Path

    def command(self, setting: str, options: argparse.Namespace) -> str:
        """What runs one setting. MODEL is the folder that ``make_inputs`` makes."""
        files = "--model.path MODEL --data.path MODEL/prompts.jsonl --reward.function MODEL/odd.py:odd"
        return f"python -m engine.run {COMMON} {self.settings[setting]} {files} {options.more}".strip()

    def output(self, setting: str, runs: Path) -> list[str]:
        """Options that have the run write its metrics.jsonl to ``runs / setting``."""
        return ["--output_dir", str(runs), "--name", setting]

    def rows(self, arguments: list[str], run: Path, steps: int) -> Rows:
        """Runs a command; its first steps."""
        return run_steps(arguments, run, steps)

    def versions(self) -> dict[str, str]:
        """Versions of what the numbers may depend on."""
        return versions()

    def measure(self, setting: str, inputs: Path, runs: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
        """Runs one setting; a record for each metric."""
        command = self.command(setting, options)
        arguments = shlex.split(command.replace("MODEL", str(inputs)))[1:]
        command += f"  # its first {options.steps} steps"
        about = {"card": card(), "versions": self.versions(), "command": command}
        rows = self.rows([*arguments, *self.output(setting, runs)], runs / setting, options.steps)
        return [
            {"setting": setting, "metric": name, "value": value, "unit": self.units[name], **about}
            for name, value in self.metrics(rows).items()
        ]

    def table(self, records: list[dict[str, Any]]) -> str:
        """Markdown: a row for each metric, a column for each setting."""
        settings = list(dict.fromkeys(record["setting"] for record in records))
        values = {(record["metric"], record["setting"]): record["value"] for record in records}
        lines = ["| metric | unit | " + " | ".join(settings) + " |", "|---|---|" + "---|" * len(settings)]
        for name, unit in self.units.items():
            cells = [f"{values[name, one]:.4g}" if (name, one) in values else "" for one in settings]
            if any(cells):
                lines.append(f"| {name} | {unit} | " + " | ".join(cells) + " |")
        return "\n".join(lines)

    def parser(self) -> argparse.ArgumentParser:
        """The command line."""
        parser = argparse.ArgumentParser(
            description=self.description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("--only", choices=self.settings, action="append", help="this setting (repeat for more)")
        parser.add_argument("--steps", type=int, default=20, help="training steps of each run")
        parser.add_argument("--small", action="store_true", help="a tiny model: tries the command out, even on a CPU")
        where = f"where the records go (by default results/{self.results.name}; of a small run nowhere)"
        parser.add_argument("--out", type=Path, help=where)
        parser.add_argument("--more", default="", help="more options of engine.run")
        return parser

    def main(self) -> None:
        """Measures, keeps, and prints, as the command line says."""
        parser = self.parser()
        options = parser.parse_args()
        if options.steps < 1:
            parser.error("--steps must be at least 1")
        out = options.out or (None if options.small else self.results)
        records = json.loads(out.read_text()) if out and out.exists() else []
        with tempfile.TemporaryDirectory() as scratch:
            inputs, runs = Path(scratch) / "model", Path(scratch) / "runs"
            inputs.mkdir()
            maker = multiprocessing.get_context("spawn").Process(target=make_inputs, args=(inputs, options.small))
            maker.start()  # a process of its own, which takes no memory of the GPU along
            maker.join()
            if maker.exitcode:
                raise SystemExit("the model could not be made")
            for setting in options.only or self.settings:
                new = self.measure(setting, inputs, runs, options)
                records = [record for record in records if record["setting"] != setting] + new
                if out:
                    out.write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n")
        print(self.table(records))


def make_inputs(folder: Path, small: bool) -> None:
    """A model folder with a word tokenizer, prompts, and a reward, all made up."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    shape: dict[str, Any] = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
    shape |= {"num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936}
    if small:
        shape |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        shape |= {"vocab_size": 2048}
    special: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=True, **shape, **special)).to(torch.bfloat16)
    model.save_pretrained(folder)
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, 2000)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    rows = [{"prompt": " ".join(f"w{3 + (31 * i + 7 * j) % 1990}" for j in range(64 + i % 64))} for i in range(512)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "odd.py").write_text(
        "def odd(completion_ids, **_):\n    return [sum(t % 2 for t in ids) / len(ids) for ids in completion_ids]\n"
    )


def card() -> str:
    """The GPU's name, or that there is none."""
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError):
        return "no GPU"


def run_steps(arguments: list[str], run: Path, steps: int) -> list[dict[str, float]]:
    """Starts a run and ends it after so many steps, before it would write tens of GB of checkpoint.

    Raises:
        SystemExit: it ended by itself.
    """
    log = run / "metrics.jsonl"
    process = subprocess.Popen([sys.executable, *arguments])
    try:
        while True:
            ended = process.poll() is not None
            lines = log.read_text().splitlines(keepends=True) if log.exists() else []
            rows = [json.loads(line) for line in lines if line.endswith("\n")]
            rows = [row for row in rows if "time/step" in row]
            if len(rows) >= steps:
                return rows[:steps]
            if ended:
                raise SystemExit(f"the run ended with status {process.returncode} after {len(rows)} step(s)")
            time.sleep(0.2)
    finally:
        process.terminate()
        process.wait()
