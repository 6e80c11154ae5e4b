"""Equal rewards teach nothing: advantages of exactly 0 at any magnitude, no pairs, weights that do not move."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from algorithms.advantages import whiten
from algorithms.bok import BestOfK
from algorithms.grpo import GRPO
from algorithms.online_dpo import OnlineDPO
from algorithms.ppo import PPO
from algorithms.rloo import RLOO
from algorithms.rollout import Objective, Rollout
from engine import run
from engine.rewards.scorer import Scorer
from engine.rollouts import experience
from engine.sample import Sample
from tests import users
from tests.unit.test_algorithms import alone
from tests.unit.test_algorithms import run as one_rank
from tests.unit.test_experience import config

MAGNITUDES = (12345.678, 0.1, 1e8, 1e-30, 1e-42, 3.3e38, -0.7, -12345.678, 0.0)


def batch(scores: list[float], size: int, length: int = 1, **fields: object) -> Rollout:
    """Groups of ``size`` responses of ``length`` tokens; scores as the engine converts them."""
    samples = [
        Sample(i, i // size, [1], response_ids=[2] * length, reward=score, reward_parts={"score": score})
        for i, score in enumerate(scores)
    ]
    given = {"old": torch.zeros(len(scores) * length), "ref": None, "values": None, "end_values": None}
    return experience.rollout(samples, **(given | fields))  # type: ignore[arg-type]


def advantages_of(objective: Objective) -> Tensor:
    assert objective.advantages is not None
    return objective.advantages


def objectives(rollout: Rollout) -> dict[str, Objective]:
    found = {
        f"grpo/{scale}": GRPO().objective(rollout, GRPO.Settings(scale_advantages=scale), one_rank())
        for scale in (True, False)
    }
    return found | {"rloo": RLOO().objective(rollout, RLOO.Settings(ratio="sequence"), one_rank(0.05))}


@pytest.mark.parametrize("score", MAGNITUDES)
@pytest.mark.parametrize("size", range(2, 17))
def test_equal_scores_have_no_advantage(score: float, size: int) -> None:
    """A mixed group beside them, whose advantages they must not be, changes nothing; neither does fp64's last bit."""
    nearly = score * (1 + 2**-50)
    rollout = batch([score] * size + [float(k) for k in range(size)] + [score, nearly] * (size // 2), size)
    for name, objective in objectives(rollout).items():
        found = advantages_of(objective)
        assert not found[:size].any() and not found[2 * size :].any(), name
        assert found[size : 2 * size].abs().max() > 0, name
        key = f"{name.split('/')[0]}/zero_advantage_fraction"
        zeros = int((found == 0).sum())
        assert objective.metrics[key] == pytest.approx(zeros / len(found))
    alike = batch([score] * size, size)
    assert all(o.metrics[f"{n.split('/')[0]}/zero_advantage_fraction"] == 1 for n, o in objectives(alike).items())


@pytest.mark.parametrize("weights,clip,scale", [({"a": 0.1, "b": 0.7}, None, 0.3), ({"a": 1.0, "b": 1.0}, 7.7, 1.1)])
def test_equal_rewards_after_weights_clip_and_scale(
    weights: dict[str, float], clip: float | None, scale: float
) -> None:
    """Two sources that give every response the same; the clipped ones become the same."""
    settings = config(
        algo="grpo",
        data={"path": __file__},
        reward={"function": "f.py:f", "model": "m", "clip": clip, "scale": scale},
    )
    reward = settings.reward.model_copy(update={"weights": weights})
    settings = settings.model_copy(update={"reward": reward})
    samples = [Sample(i, i // 6, [1], response_ids=[2]) for i in range(12)]
    extra = [0.0] * 6 if clip is None else [float(i) for i in range(6)]
    sources = {"a": lambda given: [12345.678] * len(given), "b": lambda given: (extra * 2)[: len(given)]}
    Scorer(sources, settings).score(samples)
    rollout = experience.rollout(samples, torch.zeros(12), None, None, None)
    for name, objective in objectives(rollout).items():
        assert not advantages_of(objective).any(), name


def test_rloo_keeps_the_penalty_of_equal_large_scores() -> None:
    """Only the KL term is left, to fp32's rounding: no large score swallows it."""
    kl = torch.tensor([0.3, 0.1, -0.2, 0.05])
    for score in (0.0, 12345.678, 1e8):
        rollout = batch([score] * 4, 4, old=torch.zeros(4), ref=-kl)
        found = advantages_of(RLOO().objective(rollout, RLOO.Settings(ratio="token"), one_rank(0.01)))
        expected = -0.01 * (kl - (kl.sum() - kl) / 3)
        torch.testing.assert_close(found, expected, rtol=2e-6 if score < 1e6 else 1e-4, atol=0)


def test_mixed_groups_are_as_ever() -> None:
    """Against fp64 by the definitions."""
    scores = [3.0, 1.5, -2.0, 12345.678, 12345.5, 12346.0, 1e-3, 2e-3, 4e-3]
    rollout = batch(scores, 3)
    wide = rollout.scores.double().reshape(3, 3)
    distance = wide - wide.mean(1, keepdim=True)
    others = wide - (wide.sum(1, keepdim=True) - wide) / 2
    expected = {"grpo/True": distance / (wide.std(1, keepdim=True) + 1e-4), "grpo/False": distance, "rloo": others}
    for name, objective in objectives(rollout).items():
        torch.testing.assert_close(advantages_of(objective).double(), expected[name].flatten(), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("score", MAGNITUDES)
def test_equal_scores_make_no_pair(score: float) -> None:
    """Nor do scores that differ by less than the engine's numbers tell; best-of-K counts them as ties."""
    rollout = batch([score] * 3 + [score, score * (1 + 1e-12), score * (1 - 1e-12)] + [0.0, -0.0, 0.0], 3)
    pairs = OnlineDPO().objective(rollout, OnlineDPO.Settings(), one_rank())
    assert pairs.units.shape == (0, 2) and pairs.metrics["online_dpo/tied_fraction"] == 1
    assert BestOfK().objective(rollout, None, one_rank()).metrics["bok/tied_fraction"] == 1


@pytest.mark.parametrize("score", MAGNITUDES)
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_ppo_whitens_no_rounding(score: float, value: float) -> None:
    """Returns and estimates are the same at every token: what is left of GAE's sums is rounding."""
    count, length = 8, 33
    values = torch.full((count * length,), value * score)
    rollout = batch([score] * count, count, length, values=values)
    objective = PPO().objective(rollout, PPO.Settings(gamma=1.0, lam=1.0), one_rank())
    assert not advantages_of(objective).any()
    assert objective.metrics["value/explained_variance"] == 0.0


def test_ppo_whitening_of_a_batch_that_differs_by_rounding() -> None:
    one = torch.tensor(12345.678)
    values = torch.stack([one, torch.nextafter(one, torch.tensor(torch.inf))] * 8)
    assert not whiten(values, alone).any()
    assert not whiten(torch.full((7,), 0.1), alone).any()
    assert not whiten(torch.empty(0), alone).any()
    small = torch.tensor([1e-3, 2e-3, -1e-3])
    torch.testing.assert_close(whiten(small, alone), (small - small.mean()) / (small.var(correction=0) + 1e-8).sqrt())


@pytest.mark.parametrize(
    "algo,score,more",
    [
        ("grpo", 12345.678, ()),  # with the KL term of a policy that is its reference
        ("grpo", 0.1, ("--kl.estimator", "k1", "--train.minibatches_per_batch", "2", "--kl.coef", "1")),
        ("rloo", 0.1, ()),
        ("rloo", 12345.678, ("--rloo.ratio", "token", "--kl.coef", "1")),
        ("online_dpo", 12345.678, ()),
    ],
)
def test_a_run_of_equal_rewards_moves_nothing(
    tmp_path: Path, without_pictures: None, algo: str, score: float, more: tuple[str, ...]
) -> None:
    model = users.model_folder(tmp_path / "model")
    reward = f"def score(completions, **columns):\n    return [{score} for _ in completions]\n"
    (tmp_path / "reward.py").write_text(reward)
    options = ["--algo", algo, "--rollout.samples_per_prompt", "7", "--train.learning_rate", "0.1"]
    assert run.main(users.arguments(tmp_path, model, *options, *more)) == 0
    before, after = load_file(model / "model.safetensors"), load_file(tmp_path / "runs/run/model/model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    rows = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    key = "online_dpo/tied_fraction" if algo == "online_dpo" else f"{algo}/zero_advantage_fraction"
    assert [row[key] for row in rows] == [1, 1]
