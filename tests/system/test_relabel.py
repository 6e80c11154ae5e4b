"""Pairs in a judge's order: what is written is what the judge says, runs train on it, and a killed command goes on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig

import engine.generate
import engine.relabel
from engine.evaluation import relabelling, response_files
from tests import users
from tests.system.helpers import run_here

WORDS = "def score(prompts, completions, **columns):\n    return [float(len(text.split())) for text in completions]\n"
PAIRS = [
    {"prompt": "a b", "chosen": "c", "rejected": "d e", "id": 0},
    {"prompt": "a c", "chosen": "d e f", "rejected": "g", "id": 1},
    {"prompt": "a d", "chosen": "e", "rejected": "f", "id": 2},
    {"prompt": "a e", "chosen": "f g h a", "rejected": "b", "id": 3},
]


def relabel(*arguments: object) -> int:
    return engine.relabel.main([str(one) for one in arguments])


def reward_model(folder: Path) -> Path:
    """A random one with the vocabulary of ``users.model_folder``."""
    config = LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, num_labels=1,
    )  # fmt: skip
    torch.manual_seed(2)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    users.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reward_model(tmp_path_factory.mktemp("models") / "gold")


@pytest.fixture
def judge(tmp_path: Path) -> list[object]:
    """The longer answer is the better one."""
    (tmp_path / "judge.py").write_text(WORDS)
    model = users.model_folder(tmp_path / "model")
    return ["--reward.function", f"{tmp_path}/judge.py:score", "--model.path", model, "--launch.device", "cpu"]


def written(path: Path, rows: list[dict[str, Any]]) -> list[object]:
    return ["--data.path", users.write_rows(path, rows)]


@pytest.mark.usefixtures("without_pictures")
def test_pairs_by_a_reward_model_have_its_scores(gold: Path, tmp_path: Path) -> None:
    """Those of transformers for each answer by itself, and runs read what is written."""
    pairs = [{"prompt": row["prompt"], "chosen": row["answer"] + " a", "rejected": "b c"} for row in users.ROWS]
    more = [*written(tmp_path / "pairs.jsonl", pairs), "--reward.model", gold, "--launch.device", "cpu"]
    for name in ("out.jsonl", "out.parquet"):
        assert relabel(*more, "--output", tmp_path / name) == 0
    rows = response_files.read(tmp_path / "out.jsonl")
    assert response_files.read(tmp_path / "out.parquet") == rows and len(rows) == len(pairs)
    model = AutoModelForSequenceClassification.from_pretrained(gold).eval()
    for row, pair in zip(rows, pairs, strict=True):
        for name in ("chosen", "rejected"):
            ids = users.tokenizer()(f"{row['prompt']} {row[name]} </s>", return_tensors="pt").input_ids
            with torch.no_grad():
                assert row[f"{name}_score"] == pytest.approx(float(model(ids).logits), abs=1e-5)
        assert row["score_margin"] == row["chosen_score"] - row["rejected_score"] > 0
        assert row["swapped"] == (row["chosen"] != pair["chosen"])
        assert {row["chosen"], row["rejected"]} == {pair["chosen"], pair["rejected"]}
    assert {row["swapped"] for row in rows} == {True, False}
    policy = users.model_folder(tmp_path / "policy")
    for algo in ("dpo", "reward_model"):
        run_here(
            f"--algo {algo} --model.path {policy} --data.path {tmp_path}/out.parquet --train.steps 1 "
            f"--train.rows_per_step 2 --launch.device cpu --output_dir {tmp_path} --name {algo}"
        )


def test_conversations_are_judged_by_the_tokens_that_training_has(gold: Path, tmp_path: Path) -> None:
    """Prompt and answers are messages, the prompt in a column or in both answers; the template is the judge's."""
    tokenizer = users.tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<turn> {{ m['content'] }} </s> {% endfor %}"
        "{% if add_generation_prompt %}<turn> {% endif %}"
    )
    tokenizer.save_pretrained(gold)
    asked = [{"role": "user", "content": "a b"}]
    answers = [[{"role": "assistant", "content": text}] for text in ("c d e", "h g")]
    rows = [{"prompt": asked, "chosen": answers[0], "rejected": answers[1]}]
    rows.append({"chosen": [*asked, *answers[0]], "rejected": [*asked, *answers[1]]})
    rows.append({"prompt": "a b", "chosen": "c d e", "rejected": "h g"})
    model, scores = AutoModelForSequenceClassification.from_pretrained(gold).eval(), []
    for text in ("c d e", "h g"):
        ids = tokenizer(f"<turn> a b </s> <turn> {text} </s>", add_special_tokens=False, return_tensors="pt").input_ids
        with torch.no_grad():
            scores.append(float(model(ids).logits))
    better, worse = sorted([0, 1], key=lambda place: -scores[place])
    for number, row in enumerate(rows):
        more = [*written(tmp_path / "pairs.jsonl", [row]), "--reward.model", gold, "--launch.device", "cpu"]
        more += ["--data.chat_template", number == 2]
        assert relabel(*more, "--output", tmp_path / f"{number}.jsonl") == 0
        (found,) = response_files.read(tmp_path / f"{number}.jsonl")
        assert (found["chosen_score"], found["rejected_score"]) == pytest.approx(
            (scores[better], scores[worse]), abs=1e-5
        )
        given = (row["chosen"], row["rejected"])
        assert (found["chosen"], found["rejected"]) == (given[better], given[worse])
        assert found.get("prompt") == row.get("prompt") and found["swapped"] == (better == 1)


def test_order_ties_and_what_is_said(judge: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*written(tmp_path / "pairs.jsonl", PAIRS), *judge]
    assert relabel(*asked, "--output", tmp_path / "out.jsonl") == 0
    rows = response_files.read(tmp_path / "out.jsonl")
    assert rows[0] == {
        "prompt": "a b", "chosen": "d e", "rejected": "c", "chosen_score": 2.0, "rejected_score": 1.0,
        "score_margin": 1.0, "swapped": True, "id": 0,
    }  # fmt: skip
    assert [(row["id"], row["swapped"]) for row in rows] == [(0, True), (1, False), (3, False)]
    error = 100 * math.sqrt((1 / 3) * (2 / 3) / 2)  # of three pairs, by the sample's deviation
    said = capsys.readouterr().out
    assert f"swapped: 33.3 ± {error:.1f} %; agreement with the given order: 66.7 %" in said
    assert "ties: 1 dropped; without a score: 0 dropped" in said
    assert relabel(*asked, "--output", tmp_path / "kept.jsonl", "--ties", "keep") == 0
    assert response_files.read(tmp_path / "kept.jsonl")[2] == {
        **PAIRS[2], "chosen_score": 1.0, "rejected_score": 1.0, "score_margin": 0.0, "swapped": False,
    }  # fmt: skip


def test_answers_that_hold_their_prompt_stay_so(judge: list[object], tmp_path: Path) -> None:
    """Columns under other names get those that are read by default; columns of an earlier judge are replaced."""
    rows = [{"yes": "a b c", "no": "a b d e", "swapped": False, "chosen_score": 7.0}]
    asked = [*written(tmp_path / "pairs.jsonl", rows), *judge, "--data.chosen_column", "yes"]
    assert relabel(*asked, "--data.rejected_column", "no", "--output", tmp_path / "out.jsonl") == 0
    assert response_files.read(tmp_path / "out.jsonl") == [
        {"chosen": "a b d e", "rejected": "a b c", "chosen_score": 2.0, "rejected_score": 1.0, "score_margin": 1.0,
         "swapped": True}
    ]  # fmt: skip


def test_responses_become_the_best_and_the_worst(judge: list[object], tmp_path: Path) -> None:
    """Of a column of lists, and of a file that engine.generate has written."""
    rows = [
        {"prompt": "a", "responses": ["b c", "", "d", "e f g", "d"], "n": 1},
        {"prompt": "b", "responses": ["c", "c"], "n": 2},
    ]
    asked = [*written(tmp_path / "lists.jsonl", rows), *judge]
    assert relabel(*asked, "--output", tmp_path / "out.jsonl") == 0
    assert response_files.read(tmp_path / "out.jsonl") == [
        {"prompt": "a", "chosen": "e f g", "rejected": "d", "chosen_score": 3.0, "rejected_score": 1.0,
         "score_margin": 2.0, "n": 1}
    ]  # fmt: skip
    data = users.write_rows(tmp_path / "prompts.jsonl", users.ROWS[:6])
    generated = [tmp_path / "model", "--data.path", data, "--rollout.samples_per_prompt", 4]
    generated += [
        "--rollout.max_response_tokens",
        6,
        "--launch.device",
        "cpu",
        "--output",
        tmp_path / "responses.jsonl",
    ]
    assert engine.generate.main([str(one) for one in generated]) == 0
    assert relabel("--data.path", tmp_path / "responses.jsonl", *judge, "--output", tmp_path / "pairs.jsonl") == 0
    by_row: dict[int, list[str]] = {}
    for row in response_files.read(tmp_path / "responses.jsonl"):
        by_row.setdefault(row["row"], []).extend([row["response"]] if row["response"] else [])
    pairs = response_files.read(tmp_path / "pairs.jsonl")
    assert [pair["prompt"] for pair in pairs] == [row["prompt"] for row in users.ROWS[:6]]
    for pair, responses in zip(pairs, by_row.values(), strict=True):
        lengths = [len(response.split()) for response in responses]
        assert (pair["chosen_score"], pair["rejected_score"]) == (max(lengths), min(lengths))
        assert {pair["chosen"], pair["rejected"]} <= set(responses) and "answer" in pair


def test_what_the_judge_drops(judge: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "judge.py").write_text(
        "def score(completions, **_):\n    return [None if 'g' in text else float(len(text)) for text in completions]\n"
    )
    assert relabel(*written(tmp_path / "pairs.jsonl", PAIRS), *judge, "--output", tmp_path / "out.jsonl") == 0
    assert [row["id"] for row in response_files.read(tmp_path / "out.jsonl")] == [0]
    assert "ties: 1 dropped; without a score: 2 dropped" in capsys.readouterr().out


def test_a_judge_that_tells_nothing_apart_is_told_so(
    judge: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its answers are kept: with --ties keep nobody is asked again."""
    (tmp_path / "judge.py").write_text("def score(completions, **_):\n    return [0.0] * len(completions)\n")
    asked = [*written(tmp_path / "pairs.jsonl", PAIRS), *judge, "--output", tmp_path / "out.jsonl"]
    assert relabel(*asked) == 2 and not (tmp_path / "out.jsonl").exists()
    assert "no pair is left to write" in capsys.readouterr().err
    assert relabel(*asked, "--ties", "keep") == 0
    assert "4 of 4 prompts" not in capsys.readouterr().out
    assert len(response_files.read(tmp_path / "out.jsonl")) == 4


def test_a_killed_command_goes_on(judge: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relabelling, "CHUNK", 1)
    asked = [*written(tmp_path / "pairs.jsonl", PAIRS), *judge]
    assert relabel(*asked, "--output", tmp_path / "whole.jsonl") == 0
    judged, asked_about = relabelling._judged, []

    def dies(one: Any, samples: Any) -> Any:
        asked_about.append(one.prompt)
        if len(asked_about) == 3:
            raise KeyboardInterrupt
        return judged(one, samples)

    monkeypatch.setattr(relabelling, "_judged", dies)
    assert relabel(*asked, "--output", tmp_path / "out.jsonl") == 130 and not (tmp_path / "out.jsonl").exists()
    assert relabel(*asked, "--output", tmp_path / "out.jsonl") == 0 and len(asked_about) == 5
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not list(tmp_path.glob("partial-*"))


def test_the_tasks_pairs_by_its_verifier(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "def score(prompts, completions, **_):\n"
        "    sums = [sum(map(int, prompt.rstrip('=').split('+'))) for prompt in prompts]\n"
        "    return [-float(int(text) == right) for text, right in zip(completions, sums)]\n"
    )
    more = ["--limit", 20, "--reward.function", f"{tmp_path}/judge.py:score", "--output", tmp_path / "out.jsonl"]
    assert relabel("--data.task", "addition", "--launch.device", "cpu", *more) == 0
    assert all(row["swapped"] for row in response_files.read(tmp_path / "out.jsonl"))


BAD = {
    "no output": (["--data.path", "DATA", "--reward.url", "http://x/"], "--output is missing"),
    "a word": (["runs/x", "--output", "OUT"], "'runs/x' is no option"),
    "suffix": (["--output", "OUT.csv"], "output: 'OUT.csv' must end with .jsonl or .parquet"),
    "no data": (["--output", "OUT.jsonl", "--reward.url", "http://x/"], "data.path is missing"),
    "no judge": (["--output", "OUT.jsonl", "--data.path", "DATA"], "nothing judges the pairs"),
    "no tokens": (["--output", "OUT.jsonl", "--data.path", "DATA", "--reward.url", "http://x/"],
                  "model.path is missing"),
    "held out": (["--output", "OUT.jsonl", "--data.eval_path", "DATA"], "unknown key 'data.eval_path'"),
    "columns": (["--output", "OUT.jsonl", "--data.path", "PROMPTS", "--reward.model", "GOLD"],
                "PROMPTS holds nothing to relabel: neither 'chosen' and 'rejected'"),
    "one side": (["--output", "OUT.jsonl", "--data.path", "DATA", "--reward.model", "GOLD", "--data.rejected_column",
                  "worse"], "DATA line 1 (row 0 counted from 0): the row has no column 'worse'"),
    "judge": (["--output", "OUT.jsonl", "--data.path", "DATA", "--reward.model", "MODEL"],
              "reward.model 'MODEL' has no"),
}  # fmt: skip


@pytest.mark.parametrize("words,line", BAD.values(), ids=BAD)
def test_what_cannot_work_is_one_line(
    gold: Path, judge: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    files = {
        "DATA": users.write_rows(tmp_path / "data.jsonl", PAIRS),
        "PROMPTS": users.write_rows(tmp_path / "prompts.jsonl", users.ROWS),
        "GOLD": gold,
        "MODEL": tmp_path / "model",
        "OUT": tmp_path / "out",
    }

    def filled(text: str) -> str:
        for name, path in files.items():
            text = text.replace(name, str(path))
        return text

    assert relabel(*map(filled, words)) == 2
    said = capsys.readouterr().err
    assert filled(line) in said and said.count("\n") == 1 and not list(tmp_path.glob("*out*"))
