"""What must not change an update, for every algorithm: what it does not train on, order, and what was dropped."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from algorithms.rollout import Objective
from engine.machine.world import joined
from engine.sample import Sample
from tests.system import updates
from tests.system.helpers import run_ranks
from tests.system.updates import ALGORITHMS, Update, Updates, batch


@pytest.fixture(scope="module")
def update(tiny_model: str) -> Iterator[Updates]:
    with joined("cpu", 5) as world:
        yield Updates(tiny_model, world)


def assert_same_update(got: Update, want: Update, tolerance: float = 1e-6) -> None:
    assert got.away_from(want) < tolerance
    assert got.metrics.keys() == want.metrics.keys()
    for name, value in want.metrics.items():
        assert got.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def other(sample: Sample, length: int) -> None:
    """Puts another response of ``length`` tokens in a sample's place."""
    rng = random.Random(sample.index)
    sample.response_ids = [rng.randint(0, 14) for _ in range(length)]
    sample.behaviour_logprobs = np.array([-1 - rng.random() for _ in range(length)], np.float32)


@pytest.mark.parametrize("algo", ["online_dpo", "bok"])
def test_only_the_scores_of_responses_that_were_not_chosen_count(update: Updates, algo: str) -> None:
    samples = batch()
    want = update(algo, samples)
    for group in range(3):
        ranked = sorted(samples[4 * group : 4 * group + 4], key=lambda one: one.reward)
        middle = ranked[1:3] if algo == "online_dpo" else ranked[:3]
        for one in middle:
            other(one, len(one.response_ids) + 3)
            one.prompt_ids = [1, 5]
            one.finish_reason = "stop" if one.finish_reason == "length" else "length"
    assert update(algo, samples).away_from(want) < 1e-6
    ranked[0].reward, ranked[-1].reward = ranked[-1].reward, ranked[0].reward
    assert update(algo, samples).away_from(want) > 1e-2, "the scores of the group count"


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_behaviour_logprobs_count_only_where_they_correct(update: Updates, algo: str) -> None:
    samples, off = batch(), {"off_policy": {"correction": False}}
    plain, corrected = update(algo, samples, **off), update(algo, samples)
    for one in samples:
        one.behaviour_logprobs = one.behaviour_logprobs - 0.5
    assert update(algo, samples, **off).away_from(plain) == 0.0
    if algo in ("ppo", "rloo", "grpo"):
        assert update(algo, samples).away_from(corrected) > 1e-2
    else:
        assert corrected.away_from(plain) == 0.0


@pytest.mark.parametrize("algo", ["ppo", "rloo", "grpo"])
def test_a_response_without_advantage_does_not_reach_the_others(update: Updates, algo: str) -> None:
    """Another text in its place, packed beside the others: attention lets nothing through."""
    samples = batch()
    count = len(samples[0].response_ids)

    def nothing_from_the_first(objective: Objective, tokens: dict[str, torch.Tensor]) -> Objective:
        targets = torch.linspace(-1, 1, len(tokens["old_logprobs"]))
        targets[:count] = 0.0
        if objective.returns is None:
            return dataclasses.replace(objective, advantages=targets)
        own = tokens["old_values"] + 0.1  # without an error where it is the target
        returns = torch.cat([own[:count], targets[count:]])
        return dataclasses.replace(objective, advantages=targets, returns=returns)

    want = update(algo, samples, nothing_from_the_first, kl={"coef": 0.0})
    other(samples[0], count)
    samples[0].prompt_ids = [1, 9, 9]
    assert update(algo, samples, nothing_from_the_first, kl={"coef": 0.0}).away_from(want) < 1e-6
    samples[1].prompt_ids = [1, 9, 9]
    assert update(algo, samples, nothing_from_the_first, kl={"coef": 0.0}).away_from(want) > 1e-2


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_text_columns_and_numbering_do_not_count(update: Updates, algo: str) -> None:
    samples = batch()
    want = update(algo, samples)
    for one in samples:
        one.group_id = 100 - 7 * one.group_id
        one.prompt_text = one.response_text = "other"
        one.columns, one.reward_parts = {"answer": 1}, {"score": 9.0}
    assert update(algo, samples).away_from(want) == 0.0


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_order_of_groups_and_of_their_samples_does_not_count(update: Updates, algo: str) -> None:
    samples, rng = batch(), random.Random(1)
    want = update(algo, samples)
    groups = [rng.sample(samples[i : i + 4], 4) for i in range(0, 12, 4)]
    assert_same_update(update(algo, [one for i in (2, 0, 1) for one in groups[i]]), want)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_dropped_samples_are_as_if_never_sampled(update: Updates, algo: str) -> None:
    """In the midst of groups, whole groups, and, where responses are compared, what is left of a group alone."""
    samples = batch()
    left = [one for one in samples if one.index not in (1, 4, 5, 6, 7, 9)]
    want = update(algo, left)
    for one in samples:
        if one not in left:
            one.reward = None
    assert_same_update(update(algo, samples), want, 1e-9)
    samples[2].reward = samples[3].reward = None
    without_group = left[3:]
    if algo in ("ppo", "bok"):
        without_group = left[:1] + left[3:]
    assert_same_update(update(algo, samples), update(algo, without_group), 1e-9)


def test_a_batch_of_ties_makes_no_step(update: Updates) -> None:
    samples = batch()
    for one in samples:
        one.reward = -2.0
    steps = update.trainer.policy.global_steps
    got = update("online_dpo", samples)
    assert not got.gradients and update.trainer.policy.global_steps == steps
    assert got.metrics["online_dpo/tied_fraction"] == 1.0
    assert all(math.isfinite(value) for value in got.metrics.values()) and "policy/loss" not in got.metrics


@pytest.fixture(scope="module")
def two_ranks(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Update]:
    out: Path = tmp_path_factory.mktemp("ranks") / "two.pt"
    run_ranks(2, updates.__file__, tiny_model, str(out))
    found = torch.load(out, weights_only=True)
    return lambda *key: Update(**found[key if len(key) > 1 else key[0]])


@pytest.mark.parametrize("without", [0, 1])
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_rank_whose_samples_were_all_dropped_changes_nothing(
    update: Updates, two_ranks: Callable[..., Update], algo: str, without: int
) -> None:
    assert_same_update(two_ranks(algo, "dropped", without), update(algo, batch(groups=2)), 2e-6)


def test_a_rank_without_samples_changes_no_update_that_finds_old_itself(
    update: Updates, two_ranks: Callable[..., Update]
) -> None:
    alone = update("grpo", batch(groups=2), own_old=True)
    assert all(math.isfinite(value) for value in alone.metrics.values())
    assert_same_update(two_ranks("grpo", "own", 1), alone, 2e-6)


def test_a_rank_of_ties_changes_no_gradient(update: Updates, two_ranks: Callable[..., Update]) -> None:
    got = two_ranks("online_dpo", "tied", 1)
    assert got.away_from(update("online_dpo", batch(groups=2))) < 2e-6
    assert got.metrics["online_dpo/tied_fraction"] == 0.5
    nothing = two_ranks("nothing")
    assert not nothing.gradients and all(math.isfinite(value) for value in nothing.metrics.values())
