"""The schedule counts planned optimizer steps, and a resumed run says where its learning rate jumps."""

from __future__ import annotations

import json
import shutil
from html import unescape
from pathlib import Path

import pytest

from engine import run
from tests import users
from tests.system.helpers import steps

pytestmark = pytest.mark.usefixtures("without_pictures")

ONE_GROUP_OF_FOUR = """
def score(completions, prompts, **columns):
    return [float(i % 4) if i < 4 else 1.0 for i in range(len(completions))]
"""
STEP = 0.01


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return users.model_folder(tmp_path_factory.mktemp("model"))


def test_minibatches_without_a_pair_advance_the_schedule(tmp_path: Path, model: Path) -> None:
    """Three of four groups are tied: one pair for two minibatches. A resume in between changes nothing."""
    (tmp_path / "reward.py").write_text(ONE_GROUP_OF_FOUR)
    options = ["--algo", "online_dpo", "--train.schedule", "linear", "--train.learning_rate", "1", "--train.steps", "3"]
    options += ["--train.minibatches_per_batch", "2", "--train.epochs_per_batch", "2", "--save.every_steps", "1"]
    assert run.main(users.arguments(tmp_path, model, *options)) == 0
    folder = tmp_path / "runs/run"
    whole = [row["policy/lr"] for row in steps(folder)]
    assert whole == pytest.approx([1 - 1.5 / 12, 1 - 5.5 / 12, 2.5 / 12], rel=1e-5)
    shutil.rmtree(folder / "checkpoints/step-000003")
    assert run.main(["--resume", str(folder)]) == 0
    assert [row["policy/lr"] for row in steps(folder)] == whole
    assert "Learning rate changed" not in (folder / "report.html").read_text()


def test_batches_of_ties_alone_advance_it(tmp_path: Path, model: Path) -> None:
    (tmp_path / "reward.py").write_text("def score(completions, **columns):\n    return [0.5] * len(completions)\n")
    options = ["--algo", "online_dpo", "--train.schedule", "cosine", "--train.learning_rate", "1", "--train.steps", "4"]
    assert run.main(users.arguments(tmp_path, model, *options, "--train.warmup_steps", "2")) == 0
    assert [row["policy/lr"] for row in steps(tmp_path / "runs/run")] == pytest.approx([0.5, 1, 1, 0.5])


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of four steps down a line, of PPO, which has two models."""
    folder = tmp_path_factory.mktemp("finished")
    options = ["--algo", "ppo", "--train.schedule", "linear", "--train.learning_rate", str(STEP), "--train.steps", "4"]
    assert run.main(users.arguments(folder, model, *options, "--save.every_steps", "2")) == 0
    return folder / "runs/run"


def resumed(finished: Path, tmp_path: Path, *options: str) -> Path:
    """The run folder, copied and gone on with."""
    folder = shutil.copytree(finished, tmp_path / "run")
    assert run.main(["--resume", str(folder), *options]) == 0
    return folder


@pytest.mark.parametrize(
    "options,policy,value",
    [
        (["--train.steps", "8"], 0.005, 0.005),
        (["--train.steps", "5", "--train.schedule", "constant", "--train.learning_rate", "0.02"], 0.02, 0.02),
        (["--train.steps", "5", "--train.warmup_steps", "8", "--ppo.value_learning_rate", "0.02"], 0.00625, 0.0125),
    ],
)
def test_a_jump_is_said_once_and_is_in_the_report(
    finished: Path, tmp_path: Path, options: list[str], policy: float, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = resumed(finished, tmp_path, *options)
    lines = [line for line in capsys.readouterr().out.splitlines() if "Learning rate" in line]
    assert lines == [
        f"Learning rate changed by resuming with other settings: policy 0.0025 before, {policy:g} next (0 by the "
        f"checkpoint's settings); value 0.0025 before, {value:g} next (0 by the checkpoint's settings)"
    ]
    assert lines[0] in unescape((folder / "report.html").read_text())
    row = steps(folder)[4]
    assert row["step"] == 5
    assert [row["policy/lr"], row["value/lr"]] == pytest.approx([policy, value])


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_nothing_is_said_where_nothing_jumps(
    model: Path, tmp_path: Path, schedule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """More steps of a constant rate; and a decay from the middle of a run, by the settings that it was begun with."""
    options = ["--train.schedule", schedule, "--train.steps", "3", "--save.every_steps", "2", "--save.keep", "2"]
    assert run.main(users.arguments(tmp_path, model, *options)) == 0
    folder = tmp_path / "runs/run"
    if schedule == "linear":
        shutil.rmtree(folder / "checkpoints/step-000003")
    more = ["--train.steps", "5"] if schedule == "constant" else []
    assert run.main(["--resume", str(folder), *more]) == 0
    assert "Learning rate" not in capsys.readouterr().out
    assert not (folder / "notes.jsonl").exists()


def test_a_second_resume_from_the_same_checkpoint_says_it_again_and_keeps_one(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder's configuration has the new settings by then, but the checkpoint is of the old ones."""
    folder = resumed(finished, tmp_path, "--train.steps", "6")
    shutil.rmtree(folder / "checkpoints/step-000006")
    assert run.main(["--resume", str(folder), "--train.steps", "6"]) == 0
    assert capsys.readouterr().out.count("Learning rate changed by resuming") == 2
    notes = [json.loads(line) for line in (folder / "notes.jsonl").read_text().splitlines()]
    assert [note["step"] for note in notes] == [5]
