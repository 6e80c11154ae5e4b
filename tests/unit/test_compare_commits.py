"""Comparing what two commits' runs did: what must be found, and what may differ."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from scripts import compare_commits
from scripts.compare_commits import collect, compared, differences
from scripts.small_runs import matrix


@pytest.fixture
def result(tmp_path: Path) -> dict[str, Any]:
    """What came of a run of one step with one evaluation."""
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "rank-0.jsonl").write_text("[[1, 8], [9, 2]]\n[[1, 8], [10, 2]]\n")
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    (run / "model" / "model.safetensors").write_bytes(b"weights")
    (run / "model" / "config.json").write_text("{}")
    (run / "samples.jsonl").write_text('{"step": 1, "prompt": "a", "response": "b", "reward": 1.0}\n')
    rows = [
        {"step": 0, "eval/reward": 0.5},
        {"step": 1, "policy/loss": 0.1, "policy/grad_norm": None, "time/step": 2.0, "tokens_per_second": 8.0},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return collect(tmp_path)


def test_equal_runs_may_differ_in_time(result: dict[str, Any]) -> None:
    other = copy.deepcopy(result)
    other["metrics"][1] |= {"time/step": 3.0, "tokens_per_second": 5.0, "idle/train": 0.5, "memory/peak_gib": 1.0}
    other["seconds"] = 9.0
    assert differences(result, other) == []


def test_a_metric_is_named_with_its_step_and_both_values(result: dict[str, Any]) -> None:
    other = copy.deepcopy(result)
    other["metrics"][1]["policy/loss"] = 0.1 + 2**-56
    assert differences(result, other) == [f"policy/loss at step 1: 0.1 and {0.1 + 2**-56}"]
    del other["metrics"][1]["policy/loss"]
    assert differences(result, other) == ["policy/loss at step 1: 0.1 and absent"]
    assert differences(other, result) == ["policy/loss at step 1: absent and 0.1"]
    assert differences(result, result | {"metrics": result["metrics"][:1]}) == ["step at step 1: 1 and absent"]


def test_a_number_that_became_nan_differs(result: dict[str, Any]) -> None:
    other = copy.deepcopy(result)
    other["metrics"][0]["eval/reward"] = None
    other["metrics"][1]["policy/grad_norm"] = 1.0
    assert differences(result, other) == ["eval/reward at step 0: 0.5 and None"]


def test_tokens_and_samples_are_compared_line_by_line(result: dict[str, Any]) -> None:
    other = copy.deepcopy(result)
    other["tokens"]["rank-0"][1][1][0] = 11
    other["samples"][0]["reward"] = 2.0
    tokens, samples = differences(result, other)
    assert tokens == "tokens of rank-0, line 2: [[1, 8], [10, 2]] and [[1, 8], [11, 2]]"
    assert samples.startswith("samples.jsonl, line 1: ")
    fewer = result | {"tokens": {"rank-0": result["tokens"]["rank-0"][:1]}}
    assert differences(result, fewer) == ['tokens of rank-0, line 2: [[1, 8], [10, 2]] and "absent"']
    assert len(differences(result, result | {"tokens": {}})) == 1


def test_every_file_of_the_model_counts(result: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run" / "model" / "model.safetensors").write_bytes(b"weighty")
    (tmp_path / "run" / "model" / "tokenizer.json").write_text("{}")
    assert differences(result, collect(tmp_path)) == ["model: model.safetensors, tokenizer.json"]


def test_a_failed_run_equals_none(result: dict[str, Any]) -> None:
    failed = {"failed": "exit status 1, and not 0\nValueError: no"}
    for pair in ((failed, result), (result, failed)):
        assert differences(*pair) == [f"failed: {failed['failed']}"]
    assert len(differences(failed, failed)) == 1
    assert len(differences(failed, {"failed": "has taken too long"})) == 2


def test_what_tells_runs_apart_is_never_left_out() -> None:
    for metric in ("policy/loss", "rollout/response_tokens_mean", "weights/logprob_gap_mean", "off_policy/staleness"):
        assert compared(metric)
    assert not any(map(compared, ("time/step", "memory/peak_gib", "idle/generate", "rollout/generate_seconds")))


def test_the_matrix_has_every_algorithm_sampler_and_schedule() -> None:
    names = [run.name for run in matrix()]
    assert len(set(names)) == len(names) == 5 * 2 * 3 + 5
    assert {"bok-vllm-split", "ppo-hf-turns", "zero3-hf", "lora-vllm", "resumed"} < set(names)


def test_the_list_is_what_the_patterns_choose(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_commits.main(["--list", "--only", "lora-*", "--only", "resumed"]) == 0
    assert capsys.readouterr().out.split() == ["lora-vllm", "lora-hf", "resumed"]
