"""The recipes in configs/, each with a tiny random model, a few rows and at most two ranks in place of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, GPTNeoXConfig

import engine.evaluate
import engine.relabel
from engine.config import Config, cli
from engine.evaluation import response_files
from tests import users
from tests.system.helpers import ROOT, run_engine, run_here, steps

CHAT = "{% for m in messages %}<turn> {{ m['content'] }}{{ eos_token }} {% endfor %}"
SPLIT = "--launch.ranks 2 --schedule.placement split --schedule.staleness 1"
RUNS = {
    "tldr": ["sft", "gold", "reward", "dpo", "ppo", "rloo", "grpo", "online_dpo", "bok"],
    "gsm8k": ["rloo", "grpo", "lora_7b", "full_7b"],
    "chat": ["sft", "reward", "dpo", "online_dpo"],
}
FAST = ("tldr", "rloo")


def rows(task: str, stage: str) -> list[dict[str, Any]]:
    """A few, with the columns of the recipe's data set."""
    return [row(task, stage, one["prompt"], one["answer"], users.WORDS[i % 8]) for i, one in enumerate(users.ROWS)]


def row(task: str, stage: str, prompt: str, answer: str, other: str) -> dict[str, Any]:
    pairs = stage in ("gold", "reward", "dpo", "relabel")
    if task == "gsm8k":
        return {"question": prompt, "answer": f"{answer} #### 7"}
    if task == "chat" and pairs:
        return {"prompt": prompt, "chosen": turns(prompt, f"{answer} a"), "rejected": turns(prompt, f"{other} b b")}
    if task == "chat":
        return {"prompt": prompt, "messages": turns(prompt, answer)}
    if pairs:
        return {"prompt": prompt, "chosen": f" {answer} a</s>", "rejected": f" {other} b b</s>"}
    return {"query": prompt, "reference_response": f" {answer}</s>"}


def turns(prompt: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    """For each task a policy and a reward model of its architecture; a base model without a template for chat's SFT."""
    made: dict[str, dict[str, Path]] = {}
    for task in RUNS:
        folder, neox = tmp_path_factory.mktemp(task), None
        if task == "tldr":
            neox = GPTNeoXConfig(
                vocab_size=16, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                max_position_embeddings=128, rotary_pct=0.25, tie_word_embeddings=False,
            )  # fmt: skip
        base = users.model_folder(folder / "base", neox)
        policy = Path(shutil.copytree(base, folder / "policy"))
        (policy / "chat_template.jinja").write_text(CHAT)
        judge = Path(shutil.copytree(policy, folder / "judge"))
        torch.manual_seed(2)
        shape = AutoConfig.from_pretrained(policy, num_labels=1)
        AutoModelForSequenceClassification.from_config(shape).save_pretrained(judge)
        made[task] = {"base": base, "policy": policy, "judge": judge}
    return made


Start = Callable[..., Path]


@pytest.fixture
def start(models: dict[str, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Runs a recipe by its task and stage, with further options; gives the run's folder."""
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(ROOT)

    def run(task: str, stage: str, more: str = "") -> Path:
        recipe = f"configs/{task}/{stage}.yaml"
        words = small(cli.parse(["--config", recipe])[0], models[task], tmp_path, rows(task, stage))
        ranks = "--launch.ranks 2" in f"{words} {more}"
        (run_engine if ranks else run_here)(f"--config {recipe} {words} {more}")
        return tmp_path / "run"

    return run


def small(config: Config, models: dict[str, Path], folder: Path, data: list[dict[str, Any]]) -> str:
    """The options that put tiny things in the place of a recipe's own."""
    new_template = isinstance(config.data.chat_template, str)
    given = {
        "model.path": models["base" if new_template else "policy"],
        "data.path": users.write_rows(folder / "data.jsonl", data),
        "data.name": "null",
        "data.split": "train",
        "data.eval_split": "null",
        "data.eval_fraction": 0.3,
        "launch.ranks": min(2, config.launch.ranks or 1),
        "launch.device": "cpu",
        "train.steps": 2,
        "eval.every_steps": 1,
        "eval.prompts": 4,
        "save.every_steps": 1,
        "output_dir": folder,
        "name": "run",
    }
    if config.trains_on_rows:
        given |= {"train.rows_per_step": 4, "data.max_row_tokens": 64}
    else:
        given |= {"rollout.prompts_per_step": 4, "rollout.max_prompt_tokens": 40, "rollout.max_response_tokens": 8}
        given |= {"generation.backend": "hf"}
    if new_template:
        given["data.new_special_tokens"] = "'<|start_header_id|>,<|end_header_id|>,<|eot_id|>'"
    for key, path in (("reward.model", config.reward.model), ("model.value_path", config.model.value_path)):
        if path:
            given[key] = models["judge"]
    return " ".join(f"--{key} {value}" for key, value in given.items())


@pytest.mark.parametrize(
    ("task", "stage"),
    [
        pytest.param(task, stage, marks=[] if (task, stage) == FAST else pytest.mark.slow)
        for task, stages in RUNS.items()
        for stage in stages
    ],
)
@pytest.mark.timeout(900)  # the first to offload an optimizer waits until it is compiled
@pytest.mark.usefixtures("without_pictures")
def test_a_recipe_runs(start: Start, task: str, stage: str) -> None:
    run = start(task, stage)
    assert len(steps(run)) == 2
    assert (run / "model" / "model.safetensors").is_file() and (run / "report.html").is_file()


@pytest.mark.parametrize("algo", ["ppo", "rloo", "grpo", "online_dpo", "bok"])
@pytest.mark.slow
def test_a_recipe_runs_split(start: Start, algo: str) -> None:
    assert len(steps(start("tldr", algo, SPLIT))) == 2


def test_every_recipe_of_a_run_is_here() -> None:
    found = {
        (path.parent.name, path.stem)
        for path in (ROOT / "configs").glob("*/*.yaml")
        if path.stem not in ("relabel", "evaluate")
    }
    assert found == {(task, stage) for task, stages in RUNS.items() for stage in stages}


@pytest.mark.parametrize("task", RUNS)
def test_an_evaluation_runs(models: dict[str, dict[str, Path]], tmp_path: Path, task: str) -> None:
    recipe = ROOT / "configs" / task / "evaluate.yaml"
    words = {
        "config": recipe,
        "output": tmp_path / "out",
        "data.path": users.write_rows(tmp_path / "data.jsonl", rows(task, "evaluate")),
        "data.name": "null",
        "data.split": "train",
        "rollout.max_prompt_tokens": 40,
        "rollout.max_response_tokens": 8,
        "generation.backend": "hf",
        "launch.device": "cpu",
    }
    if "reward: {model" in recipe.read_text():
        words["reward.model"] = models[task]["judge"]
    given = [str(word) for key, value in words.items() for word in (f"--{key}", value)]
    assert engine.evaluate.main([str(models[task]["policy"]), *given]) == 0
    (model,) = json.loads((tmp_path / "out" / "evaluation.json").read_text())["models"]
    assert {"tldr": "win_rate", "gsm8k": "pass@4", "chat": "score"}[task] in model["figures"]


@pytest.mark.slow
def test_relabelling_gives_pairs_to_train_on(models: dict[str, dict[str, Path]], start: Start, tmp_path: Path) -> None:
    """The relabel stage's file is the data of the reward stage."""
    file, pairs = tmp_path / "pairs.parquet", users.write_rows(tmp_path / "given.jsonl", rows("tldr", "relabel"))
    words = f"--config configs/tldr/relabel.yaml --data.path {pairs} --output {file} --launch.device cpu"
    assert engine.relabel.main([*words.split(), "--reward.model", str(models["tldr"]["judge"])]) == 0
    assert {"prompt", "chosen", "rejected", "score_margin"} <= response_files.read(file)[0].keys()
    assert len(steps(start("tldr", "reward", f"--data.path {file}"))) == 2
