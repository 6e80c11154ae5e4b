"""Measures runs that train and sample on the same GPUs: python -m benchmarks.colocation [--only SETTING] [--steps N]

PPO on random weights of Qwen2-1.5B's shape in bf16, 256 responses of up to 512 tokens a step, started as a user would
start it. What a run writes to its metrics.jsonl becomes records in benchmarks/results/colocation-h100.json, which
replace earlier ones of the same setting; a table goes to the terminal.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from engine.summary import versions

RESULTS = Path(__file__).resolve().parent / "results" / "colocation-h100.json"
SETTINGS = {
    "zero2-1gpu": "--launch.ranks 1 --train.zero_stage 2 --memory.sleep level2 --memory.zero_copy off",
    "zero2-2gpu": "--launch.ranks 2 --train.zero_stage 2 --memory.sleep level2 --memory.zero_copy off",
    "zero3-2gpu": "--launch.ranks 2 --train.zero_stage 3 --memory.sleep level2",
    "zerocopy-1gpu": "--launch.ranks 1 --train.zero_stage 2 --memory.sleep kv --memory.zero_copy auto",
}
COMMON = (
    "--algo ppo --model.dtype bfloat16 --model.gradient_checkpointing true --generation.backend vllm "
    "--rollout.prompts_per_step 64 --rollout.samples_per_prompt 4 --rollout.max_prompt_tokens 128 "
    "--rollout.max_response_tokens 512 --train.learning_rate 1e-6 --train.tokens_per_microbatch 16384 "
    "--train.steps 100000"
)
UNITS = {
    "handover_cycle_s": "s",
    "handover_share": "share of a step",
    "offload_s": "s",
    "step_s": "s",
    "gap_mean_nats": "nats",
    "gap_p999_nats": "nats",
    "plan_error": "share of the plan",
    "asleep_growth": "share of cycle 2",
    "asleep_gib": "GiB",
    "peak_gib": "GiB",
}


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


def metrics(rows: list[dict[str, float]]) -> dict[str, float]:
    """One number for each metric from a run's steps. The first step, which compiles and allocates, gives no times."""
    later = rows[1:] or rows
    cycles = [row["time/sleep"] + row["time/sync"] for row in later]
    errors = [value for row in later for name, value in row.items() if name.startswith("memory/plan_error_")]
    found = {
        "handover_cycle_s": statistics.median(cycles),
        "handover_share": statistics.median(c / row["time/step"] for c, row in zip(cycles, later, strict=True)),
        "step_s": statistics.median(row["time/step"] for row in later),
        "gap_mean_nats": max(row["weights/logprob_gap_mean"] for row in rows),
        "gap_p999_nats": max(row["weights/logprob_gap_p999"] for row in rows),
        "peak_gib": max(row["memory/peak_gib"] for row in rows),
    }
    if errors:
        found["plan_error"] = max(errors, key=abs)
    if "memory/asleep_gib" in rows[-1]:
        found["asleep_gib"] = rows[-1]["memory/asleep_gib"]
        found["asleep_growth"] = max((row["memory/asleep_growth"] for row in rows), key=abs)
    if "time/offload" in rows[-1]:
        found["offload_s"] = statistics.median(row["time/offload"] for row in later)
    return found


def card() -> str:
    """The GPU's name, or that there is none."""
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError):
        return "no GPU"


def run_steps(arguments: list[str], run: Path, steps: int) -> list[dict[str, float]]:
    """Starts the engine and ends it after so many steps, before it would write tens of GB of checkpoint.

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


def measure(setting: str, inputs: Path, runs: Path, steps: int, more: str) -> list[dict[str, Any]]:
    """Runs the engine in one setting; a record for each metric."""
    files = "--model.path MODEL --data.path MODEL/prompts.jsonl --reward.function MODEL/odd.py:odd"
    command = f"python -m engine.run {COMMON} {SETTINGS[setting]} {files} {more}".strip()
    arguments = [*shlex.split(command.replace("MODEL", str(inputs)))[1:], "--output_dir", str(runs), "--name", setting]
    measured = metrics(run_steps(arguments, runs / setting, steps))
    about = {"card": card(), "versions": versions(), "command": f"{command}  # its first {steps} steps"}
    return [
        {"setting": setting, "metric": name, "value": value, "unit": UNITS[name], **about}
        for name, value in measured.items()
    ]


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: a row for each metric, a column for each setting."""
    settings = list(dict.fromkeys(record["setting"] for record in records))
    values = {(record["metric"], record["setting"]): record["value"] for record in records}
    lines = ["| metric | unit | " + " | ".join(settings) + " |", "|---|---|" + "---|" * len(settings)]
    for name, unit in UNITS.items():
        cells = [f"{values[name, one]:.4g}" if (name, one) in values else "" for one in settings]
        if any(cells):
            lines.append(f"| {name} | {unit} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measures, keeps, and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SETTINGS, action="append", help="this setting (repeat for more)")
    parser.add_argument("--steps", type=int, default=20, help="PPO steps of each run")
    parser.add_argument("--small", action="store_true", help="a tiny model: tries the command out, even on a CPU")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the records go")
    parser.add_argument("--more", default="", help="more options of engine.run")
    options = parser.parse_args()
    records = json.loads(options.out.read_text()) if options.out.exists() else []
    with tempfile.TemporaryDirectory() as scratch:
        inputs, runs = Path(scratch) / "model", Path(scratch) / "runs"
        inputs.mkdir()
        maker = multiprocessing.get_context("spawn").Process(target=make_inputs, args=(inputs, options.small))
        maker.start()  # a process of its own, which takes no memory of the GPU along
        maker.join()
        if maker.exitcode:
            raise SystemExit("the model could not be made")
        for setting in options.only or SETTINGS:
            new = measure(setting, inputs, runs, options.steps, options.more)
            records = [record for record in records if record["setting"] != setting] + new
            options.out.write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n")
    print(table(records))


if __name__ == "__main__":
    main()
