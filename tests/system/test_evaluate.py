"""Judged models: a whole evaluation of a run, of folders, by scores and by pairs, and after a kill."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import engine.evaluate
from engine.evaluation import response_files, sampling
from tests import users
from tests.system.helpers import run_here
from tests.system.test_runs import short

LENGTH = "def score(completions, **columns):\n    return [float(len(text.split())) for text in completions]\n"
PAIRS = (
    "def longer(prompts, completions_a, completions_b, answer):\n"
    "    assert len(prompts) == len(answer)\n"
    "    return [len(a.split()) - len(b.split()) for a, b in zip(completions_a, completions_b)]\n"
)


def evaluate(*arguments: object) -> int:
    return engine.evaluate.main([str(one) for one in arguments])


def found(folder: Path) -> dict:
    return json.loads((folder / "evaluation.json").read_text())


def figures(folder: Path) -> dict[str, dict[str, float]]:
    return {
        one["name"]: {name: figure["value"] for name, figure in one["figures"].items()}
        for one in found(folder)["models"]
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of one vocabulary."""
    one, other = (tmp_path_factory.mktemp("models") / name for name in ("one", "other"))
    users.model_folder(one)
    users.model_folder(other)
    model = AutoModelForCausalLM.from_pretrained(other)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    model.save_pretrained(other)
    return one, other


@pytest.fixture
def asked(folders: tuple[Path, Path], tmp_path: Path) -> list[object]:
    """Both models, twelve prompts, two responses each, the longer the better."""
    rows = [row | {"given": "a b c d", "chosen": [{"role": "assistant", "content": "a b"}]} for row in users.ROWS[:12]]
    data = users.write_rows(tmp_path / "data.jsonl", rows)
    (tmp_path / "judge.py").write_text(LENGTH + PAIRS)
    options = {
        "data.path": data,
        "rollout.samples_per_prompt": 2,
        "rollout.max_response_tokens": 6,
        "generation.max_batch": 8,
        "launch.device": "cpu",
        "output": tmp_path / "out",
    }
    return [*folders, *(word for key, value in options.items() for word in (f"--{key}", value))]


def test_figures_of_two_models_are_those_of_their_responses(
    asked: list[object], folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = ["--reward.function", f"{tmp_path}/judge.py:score", "--reference", "one"]
    assert evaluate(*asked, *judge) == 0
    table = capsys.readouterr().out
    one, other = (response_files.read(tmp_path / "out" / "responses" / f"{name}.jsonl") for name in ("one", "other"))
    lengths = [np.array([len(row["response"].split()) for row in rows]).reshape(12, 2) for rows in (one, other)]
    pairs = lengths[1][:, :, None] - lengths[0][:, None, :]
    wins = (pairs > 0).mean((1, 2))
    values = found(tmp_path / "out")
    given = values["models"][1]["figures"]
    assert given["win_rate"] == pytest.approx(
        {"value": wins.mean(), "stderr": wins.std(ddof=1) / math.sqrt(12), "prompts": 12}
    )
    assert given["ties"]["value"] == pytest.approx((pairs == 0).mean())
    assert given["normalised"]["value"] == pytest.approx(lengths[1].mean() - lengths[0].mean())
    assert given["score"]["value"] == pytest.approx(lengths[1].mean())
    own, reference = (logprobs(folder, other) for folder in folders[::-1])
    kl = (own - reference).reshape(12, 2).mean(1)
    assert given["kl"]["value"] == pytest.approx(kl.mean(), abs=1e-3) and kl.mean() > 0
    assert given["kl"]["stderr"] == pytest.approx(kl.std(ddof=1) / math.sqrt(12), abs=1e-3)
    tokens = sum(len(row["response_ids"]) for row in other)
    assert given["perplexity"]["value"] == pytest.approx(math.exp(-reference.sum() / tokens), rel=1e-4)
    assert values["models"][0]["figures"]["kl"] == {"value": 0, "stderr": 0, "prompts": 12}
    assert values["baseline"] == "one" and re.search(r"^other +\d", table, re.M) and "win rate" in table
    picture = ElementTree.parse(tmp_path / "out" / "win-rate-kl.svg").getroot()
    assert len([one for one in picture.iter() if "dot" in one.get("class", "")]) == 2
    assert "other, KL" in (tmp_path / "out" / "evaluation.html").read_text()


def logprobs(folder: Path, rows: list[dict]) -> np.ndarray:
    """Of each response, by transformers."""
    model, sums = AutoModelForCausalLM.from_pretrained(folder), []
    for row in rows:
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        with torch.no_grad():
            each = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        sums.append(float(each[-len(row["response_ids"]) :].sum()))
    return np.array(sums)


def test_a_judge_of_pairs_agrees_with_the_same_judge_by_scores(asked: list[object], tmp_path: Path) -> None:
    """One sample a prompt, so that both see the same pairs; the responses of the first are used again."""
    one = [*asked, "--rollout.samples_per_prompt", 1]
    assert evaluate(*one, "--reward.function", f"{tmp_path}/judge.py:score") == 0
    scored, times = figures(tmp_path / "out"), (tmp_path / "out" / "responses" / "one.jsonl").stat().st_mtime_ns
    assert evaluate(*one, "--judge.pairwise", f"{tmp_path}/judge.py:longer") == 0
    judged = figures(tmp_path / "out")
    assert (tmp_path / "out" / "responses" / "one.jsonl").stat().st_mtime_ns == times
    for name in ("one", "other"):
        assert {key: scored[name][key] for key in judged[name]} == judged[name]
    assert "score" not in judged["one"] and judged["other"]["win_rate"] + judged["other"]["ties"] > 0


@pytest.mark.parametrize("column,length", [("given", 4), ("chosen", 2)])
def test_a_column_as_the_baseline(asked: list[object], tmp_path: Path, column: str, length: int) -> None:
    assert evaluate(*asked, "--reward.function", f"{tmp_path}/judge.py:score", "--baseline.column", column) == 0
    values = figures(tmp_path / "out")["one"]
    assert values["normalised"] == pytest.approx(values["score"] - length)
    assert found(tmp_path / "out")["baseline"] == f"column {column}" and "kl" not in values


def test_a_killed_evaluation_goes_on(asked: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = ["--reward.function", f"{tmp_path}/judge.py:score"]
    assert evaluate(*asked, *more, "--output", tmp_path / "whole") == 0
    sample, drawn = sampling._sample, []

    def dies(work: sampling.Task, *arguments: object) -> object:
        drawn.append(work)
        if len(drawn) == 5:  # of the second model's three chunks the second
            raise KeyboardInterrupt
        return sample(work, *arguments)

    monkeypatch.setattr(sampling, "_sample", dies)
    assert evaluate(*asked, *more) == 130 and not (tmp_path / "out" / "evaluation.json").exists()
    assert evaluate(*asked, *more) == 0 and len(drawn) == 7
    for name in ("one", "other"):
        paths = [tmp_path / folder / "responses" / f"{name}.jsonl" for folder in ("out", "whole")]
        assert paths[0].read_bytes() == paths[1].read_bytes()
    assert found(tmp_path / "out")["models"] == found(tmp_path / "whole")["models"]


def test_all_models_of_a_run_by_its_own_reward_and_by_another(tiny_model: str, tmp_path: Path) -> None:
    more = "--algo grpo --train.steps 1 --train.learning_rate 1e-2 --save.best true"
    run_here(short(tiny_model, tmp_path, "run") + more)
    run = tmp_path / "run"
    few = ["--limit", 6, "--rollout.samples_per_prompt", 4, "--launch.device", "cpu", "--data.task", "addition"]
    assert evaluate(run, *few) == 0
    values = figures(run / "evaluation")
    assert {"base", "model"} <= values.keys() and values["base"]["kl"] == 0 and values["base"]["win_rate"] < 0.5
    assert values["model"]["kl"] != 0
    assert evaluate(run, *few, "--output", tmp_path / "verified", "--reward.function", f"{tmp_path}/even.py:even") == 0
    values = figures(tmp_path / "verified")["model"]
    assert values["pass@4"] >= values["pass@2"] >= values["accuracy"] and "score" not in values
    steps = {one["name"]: one["step"] for one in found(tmp_path / "verified")["models"]}
    assert steps["base"] == 0 and steps["model"] == 1


BAD = {
    "nothing": (["--output", "OUT"], "nothing to evaluate: name a run, or models"),
    "no output": (["ONE", "--data.path", "DATA", "--reward.function", "JUDGE:score"], "--output is missing"),
    "no judge": (["ONE", "--data.path", "DATA", "--output", "OUT"], "nothing judges the responses"),
    "two judges": (["ONE", "--data.path", "DATA", "--output", "OUT", "--reward.function", "JUDGE:score",
                    "--judge.pairwise", "JUDGE:longer"], "give one of judge.pairwise and reward.function"),
    "baseline": (["ONE", "--data.path", "DATA", "--output", "OUT", "--reward.function", "JUDGE:score",
                  "--baseline.model", "sft"], "baseline.model: there is no 'sft' among one"),
    "column": (["ONE", "--data.path", "DATA", "--output", "OUT", "--reward.function", "JUDGE:score",
                "--baseline.column", "sft", "--rollout.max_response_tokens", "8"],
               "baseline.column: the data has no column 'sft', but prompt, answer"),
    "twice": (["ONE", "ONE", "--data.path", "DATA", "--output", "OUT"], "two of the models would be called"),
}  # fmt: skip


@pytest.mark.parametrize("words,line", BAD.values(), ids=BAD)
def test_what_cannot_work_is_one_line(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    (tmp_path / "judge.py").write_text(LENGTH + PAIRS)
    files = {
        "DATA": users.write_rows(tmp_path / "data.jsonl", users.ROWS),
        "JUDGE": tmp_path / "judge.py",
        "ONE": folders[0],
        "OUT": tmp_path / "out",
    }

    def filled(text: str) -> str:
        for name, path in files.items():
            text = text.replace(name, str(path))
        return text

    assert evaluate(*map(filled, words)) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {line}") and said.count("\n") == 1


def test_a_failing_judge_ends_with_one_line(
    asked: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.py").write_text("def score(completions, **_):\n    return [1.0]\n")
    assert evaluate(*asked, "--reward.function", f"{tmp_path}/bad.py:score") == 1
    said = capsys.readouterr().err
    assert "returned 1 scores for 24 responses" in said and said.count("\n") == 1
