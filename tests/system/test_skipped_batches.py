"""Rollout batches of which no response got a usable score: steps that change no weight, so many in a row as allowed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import run
from engine.rewards import RewardError
from tests import users
from tests.system.helpers import run_engine, steps

pytestmark = pytest.mark.usefixtures("without_pictures")

REWARD = """
import os

def score(completions, step=[0], **columns):
    step[0] += 1
    scores = [float(len(text)) for text in completions]
    return drop(step[0], int(os.environ.get("RANK", "0")), scores)

def drop(step, rank, scores):
"""
NONE = REWARD + "    return [None] * len(scores)\n"
SECOND = REWARD + "    return [None] * len(scores) if step == 2 else scores\n"
ONE_LEFT = REWARD + "    return scores[:1] + [None] * (len(scores) - 1) if step == 2 else scores\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return users.model_folder(tmp_path_factory.mktemp("model"))


def arguments(folder: Path, model: Path, reward: str, *more: str) -> list[str]:
    (folder / "reward.py").write_text(reward)
    return users.arguments(folder, model, *more)


def same(a: Any, b: Any) -> bool:
    """Whether two nested states hold the same bits."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return True


def trained(checkpoint: Path) -> list[Any]:
    """Weights and optimizer states of every model."""
    files = sorted(checkpoint.glob("*/*_states.pt"))
    assert files
    states = [torch.load(file, weights_only=False) for file in files]
    # The learning rate goes on, moments and weights do not.
    kept = [(one.get("module"), one.get("optimizer") or one["optimizer_state_dict"]) for one in states if one]
    return [(module, optimizer.get("state", optimizer.get("base_optimizer_state"))) for module, optimizer in kept]


def state(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "state.json").read_text())


@pytest.mark.parametrize(
    "algo,staleness,reward",
    [
        ("grpo", 0, ONE_LEFT),
        pytest.param("rloo", 1, SECOND, marks=pytest.mark.slow),
        ("ppo", 1, SECOND),
        ("online_dpo", 0, ONE_LEFT),
        pytest.param("bok", 0, SECOND, marks=pytest.mark.slow),
    ],
)
def test_a_skipped_batch_is_a_step_that_changes_no_weight(
    tmp_path: Path, model: Path, algo: str, staleness: int, reward: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Momentum of the step before and weight decay do nothing either; cursor, schedule and run go on."""
    options = {
        "algo": algo, "schedule.staleness": staleness, "train.steps": 3, "train.schedule": "linear",
        "train.minibatches_per_batch": 2, "train.learning_rate": 0.01, "train.weight_decay": 0.1,
        "save.every_steps": 1, "save.keep": 3,
    }  # fmt: skip
    flat = [part for key, value in options.items() for part in (f"--{key}", str(value))]
    assert run.main(arguments(tmp_path, model, reward, *flat)) == 0
    checkpoints = [tmp_path / f"runs/run/checkpoints/step-00000{step}" for step in (1, 2, 3)]
    weights = [trained(one) for one in checkpoints]
    assert same(weights[0], weights[1]) and not same(weights[1], weights[2])
    assert [state(one)["cursor"] for one in checkpoints] == [4, 8, 12]
    assert [state(one)["version"] for one in checkpoints] == [1, 2, 3]
    assert [state(one)["skipped"] for one in checkpoints] == [0, 1, 0]
    rows = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    assert [row["reward/dropped_fraction"] for row in rows] == [0, 1, 0]
    assert [row["policy/lr"] for row in rows] == pytest.approx([0.01 * 11 / 12, 0.01 * 7 / 12, 0.01 * 3 / 12], rel=1e-5)
    assert not {"reward/mean", "policy/loss", "policy/grad_norm", "value/loss", "kl/ref_mean"} & rows[1].keys()
    assert None not in rows[1].values()
    assert rows[2].get("off_policy/staleness") == staleness
    said = [line for line in capsys.readouterr().out.splitlines() if "trains on nothing" in line]
    what = "0 of 16 responses got a reward"
    if reward == ONE_LEFT:
        what = f"1 of 16 responses got a reward, and no prompt has the 2 that {algo} compares"
    assert said == [f"Step 2 trains on nothing: {what} (1 in a row, of 10 by rollout.max_skipped_batches)"]
    samples = [json.loads(line) for line in (tmp_path / "runs/run/samples.jsonl").read_text().splitlines()]
    assert any(row["step"] == 2 and row["reward"] is None for row in samples), "what was given no score can be seen"


def test_the_value_models_warm_up_goes_on(tmp_path: Path, model: Path) -> None:
    options = ["--algo", "ppo", "--ppo.value_warmup_steps", "2", "--train.steps", "4", "--train.schedule", "linear"]
    assert run.main(arguments(tmp_path, model, SECOND, *options, "--train.learning_rate", "0.01")) == 0
    rows = steps(tmp_path / "runs/run")
    assert [row["value/lr"] for row in rows] == pytest.approx([0.01, 0.0075, 0.005, 0.0025], rel=1e-5)
    assert [row.get("policy/lr") for row in rows] == [None, None, pytest.approx(0.01), pytest.approx(0.005)]


def test_the_adaptive_penalty_does_not_move(tmp_path: Path, model: Path) -> None:
    options = ["--kl.target", "1", "--kl.horizon", "16", "--train.steps", "3", "--algo", "rloo"]
    assert run.main(arguments(tmp_path, model, SECOND, *options)) == 0
    coefs = [row["kl/coef"] for row in steps(tmp_path / "runs/run")]
    assert coefs[0] > coefs[1] == coefs[2]


def test_one_more_than_allowed_ends_the_run_also_over_a_resume(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments(tmp_path, model, NONE, "--rollout.max_skipped_batches", "3")
    assert run.main(given) == 0, "two in a row are allowed"
    folder = tmp_path / "runs/run"
    with pytest.raises(RewardError, match=r"^step 4: .* 4 rollout batches in a row .*0 of 16 .* allows 3: .*samples"):
        run.main(["--resume", str(folder), "--train.steps", "9"])
    assert [row["step"] for row in steps(folder)] == [1, 2, 3]
    assert "RewardError: step 4: nothing to train on" in (folder / "crash.txt").read_text()
    said = capsys.readouterr().out
    assert "(3 in a row, of 3 by rollout.max_skipped_batches)" in said


@pytest.mark.slow
def test_two_ranks_skip_together(tmp_path: Path, model: Path) -> None:
    """The first batch has no score on either rank, the second on one of them, which is no skip."""
    reward = REWARD + "    return [None] * len(scores) if step == 1 or (step == 2 and rank == 1) else scores\n"
    options = ["--launch.ranks", "2", "--train.steps", "3", "--train.zero_stage", "2", "--kl.coef", "0"]
    done = run_engine(" ".join(arguments(tmp_path, model, reward, *options)))
    rows = steps(tmp_path / "runs/run")
    assert [row["reward/dropped_fraction"] for row in rows] == [1, 0.5, 0]
    assert "policy/loss" not in rows[0] and "policy/loss" in rows[1]
    assert done.stdout.count("trains on nothing: 0 of 16 responses") == 1


@pytest.mark.slow
def test_a_sampler_on_a_rank_of_its_own_goes_on(tmp_path: Path, model: Path) -> None:
    options = ["--launch.ranks", "2", "--schedule.placement", "split", "--schedule.staleness", "1"]
    run_engine(" ".join(arguments(tmp_path, model, SECOND, *options, "--train.steps", "4")))
    rows = steps(tmp_path / "runs/run")
    assert [row["reward/dropped_fraction"] for row in rows] == [0, 1, 0, 0]
    assert [row.get("off_policy/staleness") for row in rows] == [0, None, 1, 1]
