"""What samples.jsonl has of a run's samples: of rank 0, or of all ranks with the dropped ones, and of held-out ones."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from engine.config import Config, ConfigError, cli
from engine.machine.world import joined
from engine.rollouts import sample_records
from engine.sample import Sample
from tests import users
from tests.system.helpers import run_engine


def sample(index: int, ids: list[int]) -> Sample:
    text = str(users.tokenizer().decode(ids, skip_special_tokens=True))
    return Sample(index=index, group_id=0, prompt_ids=[8], response_ids=ids, response_text=text, reward=1.0)


def settings(wanted: Any) -> Config:
    return cli.validate({"save": {"samples_per_step": wanted}})


def test_special_tokens_are_written_once_where_they_end_a_response() -> None:
    drawn = [sample(0, [8, 9, 2]), sample(1, [8, 3, 9]), sample(2, [8, 9])]
    with joined("cpu", 1) as world:
        few, every = (
            sample_records.of_step(drawn[:2], drawn, users.tokenizer(), settings(wanted), world)
            for wanted in (1, "all")
        )
        held_out = sample_records.of_evaluation(drawn, users.tokenizer(), settings(2), world)
    assert [row["response"] for row in every] == ["a b", "a b", "a b"] and len(few) == 1
    assert every[0]["response"] + every[0]["ending"] == "a b </s>" and "response_raw" not in every[0]
    assert every[1]["response_raw"] == "a <turn> b" and not {"ending", "response_raw"} & every[2].keys()
    assert ["dropped" in row for row in every] == [False, False, True]
    assert [row["held_out"] for row in held_out] == [True, True]


@pytest.mark.parametrize("wanted", ["every", "-1"])
def test_a_number_or_all(wanted: str) -> None:
    with pytest.raises(ConfigError, match=r"^save\.samples_per_step = "):
        cli.parse(["--save.samples_per_step", wanted])
    assert cli.parse(["--save.samples_per_step", "all"])[0].save.samples_per_step == "all"
    assert cli.parse(["--save.samples_per_step", "3"])[0].save.samples_per_step == 3


@pytest.mark.slow
def test_all_samples_of_two_ranks(tmp_path: Path) -> None:
    """Each once, in the batch's order; those without a score are marked."""
    reward = "def score(completions, **columns):\n    return [None if len(t) < 6 else 1.0 for t in completions]\n"
    (tmp_path / "reward.py").write_text(reward)
    held_out = users.write_rows(tmp_path / "h.jsonl", users.ROWS[:6])
    words = users.arguments(tmp_path, users.model_folder(tmp_path / "model"), "--save.samples_per_step", "all",
                            "--algo", "rloo", "--launch.ranks", "2", "--data.eval_path", str(held_out),
                            "--data.eval_overlap", "true")  # fmt: skip
    run_engine(shlex.join(words))
    rows = [json.loads(line) for line in (tmp_path / "runs" / "run" / "samples.jsonl").open()]
    for step in (1, 2):
        drawn = [row for row in rows if row["step"] == step and not row.get("held_out")]
        assert len(drawn) == 16
        assert [row["prompt"] for row in drawn] == [row["prompt"] for row in drawn[::4] for _ in range(4)]
        assert all(row.get("dropped", False) for row in drawn if row["reward"] is None)
    assert any(row.get("dropped") for row in rows)
    asked = [row["prompt"] for row in rows if row.get("held_out") and row["step"] == 0]
    assert asked == [row["prompt"] for row in users.ROWS[:6]]
