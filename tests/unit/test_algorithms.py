"""Every algorithm against examples computed by hand; their losses are compared in tests/system/test_losses.py."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from algorithms import advantages, kl_control, value
from algorithms.base import Run
from algorithms.bok import BestOfK
from algorithms.grpo import GRPO
from algorithms.normalise import by_pair, by_sequence, by_token
from algorithms.online_dpo import OnlineDPO
from algorithms.ppo import PPO
from algorithms.rloo import RLOO
from algorithms.rollout import Objective, Rollout, kl_tokens, sequence_sums


def alone(tensor: Tensor) -> Tensor:
    return tensor


def run(kl_coef: float = 0.0) -> Run:
    """Of one rank."""
    return Run(0, kl_coef, "k3", 8, reduce=alone, gather=lambda vector: (vector, slice(0, len(vector))))


def rollout(**fields: object) -> Rollout:
    """Three prompts with two responses each, of 2, 1, 3, 1, 1, 2 tokens."""
    lengths = torch.tensor([2, 1, 3, 1, 1, 2])
    total = int(lengths.sum())
    generator = torch.Generator().manual_seed(0)
    defaults = {
        "scores": torch.tensor([1.0, 0.0, 0.0, 0.0, 2.0, 3.0]),
        "group_ids": torch.tensor([0, 0, 1, 1, 2, 2]),
        "truncated": torch.tensor([False, True, False, False, True, False]),
        "cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        "old_logprobs": -torch.rand(total, generator=generator),
        "ref_logprobs": -torch.rand(total, generator=generator),
        "values": torch.rand(total, generator=generator),
        "end_values": torch.rand(6, generator=generator),
    }
    return Rollout(**(defaults | fields))  # type: ignore[arg-type]


def test_rloo_by_hand() -> None:
    """Without KL each advantage is the score less the other one's; K = 2 makes that a difference."""
    objective = RLOO().objective(rollout(ref_logprobs=None), RLOO.Settings(ratio="sequence"), run())
    by_response = [1.0, -1.0, 0.0, 0.0, -1.0, 1.0]
    expected = [a for a, n in zip(by_response, [2, 1, 3, 1, 1, 2], strict=True) for _ in range(n)]
    assert objective.advantages is not None
    assert objective.advantages.tolist() == expected
    assert objective.normalise is by_sequence and objective.loss["ratio"] == "sequence"
    assert objective.metrics["rloo/zero_advantage_fraction"] == pytest.approx(2 / 6)


def test_rloo_subtracts_kl_of_the_response() -> None:
    batch = rollout()
    returns = [
        float(batch.scores[i]) - 0.5 * sum(float(batch.old_logprobs[t] - batch.ref_logprobs[t]) for t in range(a, b))  # type: ignore[index]
        for i, (a, b) in enumerate(zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True))
    ]
    objective = RLOO().objective(batch, RLOO.Settings(ratio="token"), run(0.5))
    assert objective.normalise is by_token
    for i in range(6):
        other = i + 1 if i % 2 == 0 else i - 1
        assert float(objective.advantages[batch.cu_seqlens[i]]) == pytest.approx(returns[i] - returns[other], abs=1e-6)  # type: ignore[index]


def grpo_objective(batch: Rollout, **changes: object) -> Objective:
    return GRPO().objective(batch, GRPO.Settings(**changes), run(0.5))  # type: ignore[arg-type]


def test_grpo_by_hand() -> None:
    """Groups score (1, 0), (0, 0) and (2, 3): distances of a half, in deviations of 1/sqrt(2) with n - 1."""
    objective = grpo_objective(rollout())
    scaled = 0.5 / (math.sqrt(0.5) + 1e-4)
    by_response = [scaled, -scaled, 0.0, 0.0, -scaled, scaled]
    expected = [a for a, n in zip(by_response, [2, 1, 3, 1, 1, 2], strict=True) for _ in range(n)]
    assert objective.advantages is not None
    assert objective.advantages.tolist() == pytest.approx(expected)
    assert objective.normalise is by_token
    clipped = {"loss": "clip", "ratio": "token", "dual_clip": None}
    assert objective.loss == clipped | {"kl_coef": 0.5, "kl_estimator": "k3"}
    assert objective.metrics["grpo/zero_advantage_fraction"] == pytest.approx(2 / 6)
    plain = grpo_objective(rollout(), scale_advantages=False, mean="sequence")
    assert plain.advantages is not None
    assert plain.advantages.tolist() == [0.5, 0.5, -0.5, 0, 0, 0, 0, -0.5, 0.5, 0.5]
    assert plain.normalise is by_sequence


def test_group_normalised_of_uneven_groups() -> None:
    found = advantages.group_normalised(
        torch.tensor([1.0, 2.0, 6.0, 5.0, 5.0, 4.0]), torch.tensor([7, 7, 7, 9, 9, 3]), True
    )
    deviation = math.sqrt((4 + 1 + 9) / 2) + 1e-4
    assert found.tolist() == pytest.approx([-2 / deviation, -1 / deviation, 3 / deviation, 0, 0, 0])


def test_leave_one_out_of_uneven_groups() -> None:
    found = advantages.leave_one_out(torch.tensor([1.0, 2.0, 6.0, 5.0, 5.0]), torch.tensor([7, 7, 7, 9, 9]))
    assert found.tolist() == [1 - 4, 2 - 3.5, 6 - 1.5, 0, 0]


def of_one_token(scores: list[float], groups: list[int]) -> Rollout:
    """Responses of one token each."""
    total = len(scores)
    return Rollout(
        scores=torch.tensor(scores),
        group_ids=torch.tensor(groups),
        truncated=torch.zeros(total, dtype=torch.bool),
        cu_seqlens=torch.arange(total + 1),
        old_logprobs=torch.zeros(total),
    )


FOUR_EACH = of_one_token([0.5, 2.0, 2.0, 1.0, 3.0, 3.0, 3.0, 3.0, 1.0, -1.0, 0.0, -1.0], [0] * 4 + [5] * 4 + [2] * 4)
"""Two equally good best ones; all the same; two equally bad worst ones."""


def dpo_objective(batch: Rollout) -> Objective:
    return OnlineDPO().objective(batch, OnlineDPO.Settings(loss="ipo", beta=0.3), run())


def test_online_dpo_pairs_by_hand() -> None:
    """Best against worst, the first of equals; a tied group makes no pair and is counted."""
    two = dpo_objective(rollout())
    assert two.units.tolist() == [[0, 1], [5, 4]]
    assert two.normalise is by_pair and two.loss == {"loss": "ipo", "beta": 0.3, "label_smoothing": 0.0}
    assert two.advantages is None and two.metrics == {"online_dpo/tied_fraction": pytest.approx(1 / 3)}
    four = dpo_objective(FOUR_EACH)
    assert four.units.tolist() == [[1, 0], [8, 9]]
    assert four.metrics == {"online_dpo/tied_fraction": pytest.approx(1 / 3)}


def test_online_dpo_of_ties_alone_has_no_pair() -> None:
    objective = dpo_objective(rollout(scores=torch.ones(6)))
    assert objective.units.shape == (0, 2) and objective.units.dtype == torch.int64
    assert objective.metrics == {"online_dpo/tied_fraction": 1.0}


def test_bok_learns_the_best_of_each_group() -> None:
    """The first of equals, and of a tied group as well: each prompt has one target."""
    four = BestOfK().objective(FOUR_EACH, None, run())
    assert four.units.tolist() == [[1], [4], [8]]
    assert four.normalise is by_token and four.loss == {"loss": "likelihood"} and four.advantages is None
    assert four.metrics == pytest.approx({"bok/best_score": (2 + 3 + 1) / 3, "bok/tied_fraction": 1 / 3})
    uneven = BestOfK().objective(of_one_token([0.0, 1.0, 7.0], [3, 3, 1]), None, run())
    assert uneven.units.tolist() == [[1], [2]]


@pytest.mark.parametrize("make", [dpo_objective, lambda batch: BestOfK().objective(batch, None, run())])
def test_a_rank_without_samples_has_no_units(make: Callable[[Rollout], Objective]) -> None:
    objective = make(of_one_token([], []))
    assert objective.units.shape[0] == 0 and objective.units.dtype == torch.int64


def test_ppo_reward_lands_on_the_last_response_token() -> None:
    """With end of sequence, without, of length one: the score is at cu_seqlens - 1, KL at every token."""
    batch = rollout()
    rewards = advantages.token_rewards(batch, kl_coef=0.1)
    expected = -0.1 * (batch.old_logprobs - batch.ref_logprobs)  # type: ignore[operator]
    for last, score in zip([1, 2, 5, 6, 7, 9], batch.scores.tolist(), strict=True):
        expected[last] += score
    torch.testing.assert_close(rewards, expected)


@pytest.mark.parametrize("bootstrap", [False, True])
def test_ppo_advantages_against_a_double_loop(bootstrap: bool) -> None:
    batch, gamma, lam = rollout(), 0.9, 0.8
    rewards = advantages.token_rewards(batch, 0.1)
    expected, returns = [], []
    for i in range(6):
        a, b = int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1])
        end = float(batch.end_values[i]) if bootstrap and batch.truncated[i] else 0.0  # type: ignore[index]
        values = [*batch.values[a:b].tolist(), end]  # type: ignore[index]
        for t in range(a, b):
            deltas = [float(rewards[s]) + gamma * values[s - a + 1] - values[s - a] for s in range(t, b)]
            expected.append(sum((gamma * lam) ** n * delta for n, delta in enumerate(deltas)))
            returns.append(expected[-1] + values[t - a])
    settings = PPO.Settings(gamma=gamma, lam=lam, whiten_advantages=False, bootstrap_truncated=bootstrap)
    objective = PPO().objective(batch, settings, run(0.1))
    torch.testing.assert_close(objective.advantages, torch.tensor(expected))
    torch.testing.assert_close(objective.returns, torch.tensor(returns))


def test_whitening_is_over_all_ranks() -> None:
    whole = torch.randn(10, generator=torch.Generator().manual_seed(1)) * 3 + 5
    parts, expected = [whole[:3], whole[3:]], (whole - whole.mean()) / whole.std(correction=0)
    torch.testing.assert_close(advantages.whiten(whole, alone), expected)

    sums: list[Tensor] = []
    for _ in range(2):  # what both ranks send in each reduction
        stage_sums: list[Tensor] = []
        for part in parts:
            calls = iter(sums)

            def reduce(x: Tensor, calls=calls, stage_sums=stage_sums) -> Tensor:
                known = next(calls, None)
                if known is None:
                    stage_sums.append(x)
                    raise StopIteration
                return known

            with pytest.raises(StopIteration):
                advantages.whiten(part, reduce)
        sums.append(stage_sums[0] + stage_sums[1])
    for part, want in zip(parts, expected.split([3, 7]), strict=True):
        calls = iter(sums)
        torch.testing.assert_close(advantages.whiten(part, lambda x, calls=calls: next(calls)), want)


def test_value_loss_takes_the_larger_error() -> None:
    loss, clipped = value.value_loss(
        torch.tensor([1.0, 0.5, 0.1]), torch.zeros(3), torch.tensor([1.0, 0.0, 0.3]), clip=0.2
    )
    # new 1.0 is right but far from old 0: the clipped 0.2 errs by 0.8; 0.5 errs more than its clipped 0.2; 0.1 is near
    assert loss.tolist() == pytest.approx([0.5 * 0.64, 0.5 * 0.25, 0.5 * 0.04])
    assert clipped.tolist() == [True, False, False]


def test_value_gradient_stops_where_clipping_decides() -> None:
    values = torch.tensor([1.0, 0.5, 0.1], requires_grad=True)
    value.value_loss(values, torch.zeros(3), torch.tensor([1.0, 0.0, 0.3]), clip=0.2)[0].sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, 0.5, -0.2])


def test_explained_variance() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0])
    assert value.explained_variance(returns, returns, alone) == pytest.approx(1.0)
    assert value.explained_variance(torch.full((3,), 2.0), returns, alone) == pytest.approx(0.0)
    assert value.explained_variance(returns, torch.ones(3), alone) == 0.0


def test_no_reference_means_no_kl() -> None:
    assert kl_tokens(rollout(ref_logprobs=None)).abs().sum() == 0


def test_sequence_sums() -> None:
    assert sequence_sums(torch.arange(4.0), torch.tensor([0, 1, 1, 4])).tolist() == [0.0, 0.0, 6.0]


@pytest.mark.parametrize("kl,factor", [(6.0, 1.0), (60.0, 1 + 0.2 * 0.1), (0.0, 1 - 0.2 * 0.1), (6.6, 1 + 0.1 * 0.1)])
def test_adaptive_kl(kl: float, factor: float) -> None:
    assert kl_control.adapted(0.5, kl, target=6.0, horizon=1000, episodes=100) == pytest.approx(0.5 * factor)


def test_adaptive_kl_stays_positive() -> None:
    coef = 0.1
    for _ in range(50):
        coef = kl_control.adapted(coef, 0.0, target=6.0, horizon=1, episodes=10_000)
    assert 0 < coef < 0.1


def test_learning_rate_schedule_counts_optimizer_steps() -> None:
    from engine.training.learning_rate import schedule_factor

    factor = schedule_factor("linear", warmup_steps=2, total_steps=6)
    assert [factor(i) for i in range(8)] == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0])
    assert schedule_factor("constant", 0, 6)(5) == 1.0
    assert schedule_factor("cosine", 0, 6)(3) == pytest.approx(0.5 * (1 + math.cos(math.pi / 2)))


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_adaptive_kl_stays_where_nothing_was_measured(kl: float) -> None:
    assert kl_control.adapted(0.5, kl, target=6.0, horizon=1000, episodes=100) == 0.5
