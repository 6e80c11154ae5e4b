"""The small runs that scripts/compare_commits.py compares: what they vary, what they read, and what they import."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.forked_runs import Command, Job
from tests.users import ROWS, model_folder, write_rows

COMMON = {
    "launch.device": "cpu",
    "live": "false",
    "rollout.prompts_per_step": "4",
    "rollout.samples_per_prompt": "4",
    "rollout.max_prompt_tokens": "8",
    "rollout.max_response_tokens": "8",
    "train.steps": "3",
    "train.learning_rate": "1e-3",
    "train.minibatches_per_batch": "2",
    "train.tokens_per_microbatch": "64",
    "eval.prompts": "4",
    "save.samples_per_step": "16",
}
"""Three steps: the second is the first on changed weights, the third the first on stale samples of changed weights."""
SAMPLERS = {
    "vllm": {"generation.backend": "vllm", "memory.kv_cache_gib": "0.0625"},
    "hf": {"generation.backend": "hf"},
}
LIBRARIES = [
    "torch", "torch._dynamo", "torch.distributed.tensor", "torch.utils.tensorboard", "transformers", "deepspeed",
    "transformers.integrations.finegrained_fp8", "transformers.models.llama.modeling_llama", "peft", "jinja2", "rich",
    "matplotlib.axes", "matplotlib.backends.backend_agg", "matplotlib.figure",
]  # fmt: skip
SCHEDULES = {
    "turns": {},
    "ahead": {"schedule.staleness": "1"},
    "split": {"schedule.placement": "split", "schedule.staleness": "1", "launch.ranks": "2"},
}
KILLED_AFTER = 4 + 2 * 16
"""Responses that the killed run has scored: those to the held-out prompts, and two steps."""
REWARD = '''
import json, os, signal

def score(prompt_ids, completion_ids):
    """Any number that differs between responses; writes down what it is given."""
    path = os.path.join(os.environ["COMPARED_TOKENS"], f"rank-{os.environ.get('RANK', '0')}.jsonl")
    with open(path, "a+") as file:
        file.seek(0)
        if len(file.readlines()) + len(completion_ids) > int(os.environ.get("COMPARED_KILL_AFTER", "1000000")):
            os.kill(os.getpid(), signal.SIGKILL)
        for pair in zip(prompt_ids, completion_ids):
            file.write(json.dumps(pair) + "\\n")
    return [float(sum(ids) % 7) for ids in completion_ids]
'''
IMPORTS = {
    "vllm": [*LIBRARIES, "vllm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"],
    "hf": LIBRARIES,
}
"""What the runs with a sampler find imported."""


@dataclass(frozen=True, eq=False)
class Run:
    """One run of the matrix; ``options`` are of ``engine.run``, on top of ``COMMON``."""

    name: str
    options: Mapping[str, str]
    resumed: bool = False
    """Killed by its reward in the third step, and resumed from the checkpoint of the second."""

    def job(self, folder: Path) -> Job:
        """How to run it beside the folder ``inputs``, with a folder of its own, which is made."""
        (folder / "tokens").mkdir(parents=True)
        files = {  # not by their whole paths, as an export may hold the model's
            "model.path": "./inputs/model",
            "data.path": "./inputs/prompts.jsonl",
            "data.eval_path": "./inputs/held_out.jsonl",
            "reward.function": "./inputs/reward.py:score",
            "output_dir": str(folder),
            "name": "run",
        }
        options = COMMON | files | dict(self.options)
        arguments = [text for key, value in options.items() for text in (f"--{key}", value)]
        tokens = {"COMPARED_TOKENS": str(folder / "tokens")}
        commands: list[Command] = [{"arguments": arguments, "environment": tokens, "expected": 0}]
        if self.resumed:
            deadly = tokens | {"COMPARED_KILL_AFTER": str(KILLED_AFTER)}
            killed: Command = {"arguments": arguments, "environment": deadly, "expected": -signal.SIGKILL}
            commands = [killed, {**commands[0], "arguments": ["--resume", f"{folder}/run"]}]
        ranks = int(options.get("launch.ranks", "1"))
        return {"name": self.name, "commands": commands, "ranks": ranks, "folder": str(folder)}


def matrix() -> list[Run]:
    """All runs, those that take longest first."""
    runs = []
    for sampler, sampling in SAMPLERS.items():
        zero3 = {"algo": "ppo", "train.zero_stage": "3", "launch.ranks": "2"}
        runs.append(Run(f"zero3-{sampler}", zero3 | sampling))
        for schedule in reversed(SCHEDULES):
            for algo in ("ppo", "rloo", "grpo", "online_dpo", "bok"):
                runs.append(Run(f"{algo}-{sampler}-{schedule}", {"algo": algo} | sampling | SCHEDULES[schedule]))
        runs.append(Run(f"lora-{sampler}", {"algo": "grpo", "lora.rank": "4"} | sampling))
    ahead = {"algo": "ppo", "save.every_steps": "2"} | SAMPLERS["hf"] | SCHEDULES["ahead"]
    return [*runs, Run("resumed", ahead, resumed=True)]


def make_inputs(folder: Path) -> Path:
    """A random model of a size that vLLM's attention takes, prompts, and the reward above."""
    shape = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    folder.mkdir()
    model_folder(folder / "model", **shape, head_dim=32)
    write_rows(folder / "prompts.jsonl", [{"prompt": row["prompt"]} for row in ROWS[:12]])
    write_rows(folder / "held_out.jsonl", [{"prompt": row["prompt"]} for row in ROWS[12:]])
    (folder / "reward.py").write_text(REWARD)
    return folder
