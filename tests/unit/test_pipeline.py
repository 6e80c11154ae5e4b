"""The embedded pipeline's pairs, and the floors that end it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts import addition_pairs, pipeline
from scripts.pipeline import TooLow
from tests import users


def response(row: int, text: str, finish_reason: str = "stop") -> dict[str, Any]:
    """A row of engine.generate's file: problem 0 is 26+20=, problem 1 is 43+34=."""
    prompt, answer = (("26+20=", "46"), ("43+34=", "77"))[row]
    return {"row": row, "raw_prompt": prompt, "answer": answer, "response": text, "finish_reason": finish_reason}


def test_the_verifier_puts_the_right_answer_over_each_wrong_response(tmp_path: Path) -> None:
    """A response counts once; what is empty, cut off or right is no wrong response."""
    samples = [response(0, "45"), response(0, "45"), response(0, "46"), response(0, "9"), response(0, "45", "length")]
    samples += [response(1, "77"), response(1, ""), response(1, "77")]
    problems = list(addition_pairs.responses_by_problem(users.write_rows(tmp_path / "responses.jsonl", samples)))
    assert [responses for _, responses in problems] == [["45", "46", "9"], ["77"]]
    verified = [(one["prompt"], one["chosen"], one["rejected"]) for one in addition_pairs.verified_pairs(*problems[0])]
    assert verified == [("26+20=", "46", "45"), ("26+20=", "46", "9")]
    assert addition_pairs.verified_pairs(*problems[1]) == []
    sampled = {"prompt": "26+20=", "chosen": "45", "rejected": "46", "answer": "46"}
    assert addition_pairs.sampled_pairs(*problems[0]) == [sampled]
    both = addition_pairs.sampled_pairs(problems[0][0], ["45", "46", "9", "8"])
    assert both == [sampled, sampled | {"chosen": "9", "rejected": "8"}]
    assert addition_pairs.sampled_pairs(*problems[1]) == []


def write(path: Path, content: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(("accuracy", "enough"), [(0.75, True), (0.7499, False)])
def test_a_reward_model_has_to_be_right_on_three_quarters_of_held_out_pairs(
    tmp_path: Path, accuracy: float, enough: bool
) -> None:
    write(tmp_path / "summary.json", {"accuracy_after": accuracy})
    if enough:
        assert "75.0%" in pipeline.reward_model_result(tmp_path)
    else:
        with pytest.raises(TooLow, match=r"held-out accuracy 75\.0%, floor 75\.0%"):
            pipeline.reward_model_result(tmp_path)


def test_relabelled_pairs_count_where_one_answer_is_right(tmp_path: Path) -> None:
    pairs = [{"answer": "46", "chosen": "46", "rejected": "45"}, {"answer": "46", "chosen": "9", "rejected": "8"}]
    assert "100.0%" in pipeline.relabelled_result(users.write_rows(tmp_path / "good.jsonl", pairs))
    wrong = {"answer": "46", "chosen": "45", "rejected": "46"}
    with pytest.raises(TooLow, match=r"of 2, 50\.0%"):
        pipeline.relabelled_result(users.write_rows(tmp_path / "bad.jsonl", [*pairs, wrong]))
    with pytest.raises(TooLow, match="no pair"):
        pipeline.relabelled_result(users.write_rows(tmp_path / "none.jsonl", pairs[1:]))


def test_the_proxys_score_has_to_rise(tmp_path: Path) -> None:
    write(tmp_path / "summary.json", {"reward_before": 1.0, "reward_after": 1.31, "reward_after_stderr": 0.1})
    assert "1.00 -> 1.31" in pipeline.policy_result(tmp_path)
    write(tmp_path / "summary.json", {"reward_before": 1.0, "reward_after": 1.29, "reward_after_stderr": 0.1})
    with pytest.raises(TooLow):
        pipeline.policy_result(tmp_path)


@pytest.mark.parametrize(
    ("win_rate", "checkpoints", "fault"),
    [(0.57, 5, None), (0.55, 5, "gold win rate"), (0.57, 4, "4 checkpoints")],
)
def test_the_judged_policy(tmp_path: Path, win_rate: float, checkpoints: int, fault: str | None) -> None:
    """Three standard errors above one half, and a picture of five policies."""
    models = [{"name": "base", "step": 0, "figures": {"win_rate": {"value": 0.0, "stderr": 0.0}}}]
    figures = {"win_rate": {"value": win_rate, "stderr": 0.02}}
    models += [{"name": f"step-{i}", "step": i, "figures": figures} for i in range(1, checkpoints)]
    models += [{"name": "model", "step": checkpoints, "figures": figures}]
    write(tmp_path / "evaluation.json", {"models": models})
    (tmp_path / "win-rate-kl.svg").write_text("<svg/>")
    (tmp_path / "responses").mkdir()
    users.write_rows(tmp_path / "responses/base.jsonl", [response(0, "45"), response(1, "78")])
    users.write_rows(tmp_path / "responses/model.jsonl", [response(0, "46"), response(1, "78")])
    if fault:
        with pytest.raises(TooLow, match=fault):
            pipeline.evaluation_result(tmp_path)
    else:
        said = pipeline.evaluation_result(tmp_path)
        assert "57.0%, floor 56.0%" in said and said.endswith("0.0% -> 50.0%")


def test_a_failed_command_shows_the_end_of_what_it_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = pipeline.Stage("broken", "fails", ["-c", "raise SystemExit('no such file: x.jsonl')"], lambda: "")
    monkeypatch.setattr(pipeline, "stages", lambda folder: [broken])
    monkeypatch.setattr("sys.argv", ["pipeline", "--folder", str(tmp_path / "new")])
    assert pipeline.main() == 1
    said = capfd.readouterr().err
    assert "no such file: x.jsonl" in said and f"status 1: {tmp_path}/new/logs" in said
