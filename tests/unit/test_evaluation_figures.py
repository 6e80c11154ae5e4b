"""Figures of an evaluation against their definitions, and their standard errors against drawing prompts again."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from engine.evaluation import figures


def test_win_rate_counts_ties_apart_and_leaves_dropped_responses_out() -> None:
    scores = [[1.0, 0.0], [0.5, None], [2.0, 3.0], [None, None]]
    baseline = [[0.5], [0.5], [1.0], [0.0]]
    found = figures.compared(figures.differences(scores, baseline))
    assert found["win_rate"] == figures.Figure(0.5, pytest.approx(np.std([0.5, 0, 1], ddof=1) / math.sqrt(3)), 3)
    assert found["ties"].value == pytest.approx(1 / 3)
    normalised = figures.mean(figures.differences(scores, baseline))
    assert normalised.value == pytest.approx((0.0 + 0.0 + 1.5) / 3) and normalised.prompts == 3
    assert figures.mean([[None]]) is None and math.isnan(figures.mean([[1.0]]).stderr)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pass_at_k_is_the_chance_of_a_right_one_among_k(k: int) -> None:
    prompts = [[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, None, 0]]
    expected = []
    for prompt in prompts:
        kept = [one for one in prompt if one is not None]
        if len(kept) >= k:
            drawn = list(itertools.combinations(kept, k))
            expected.append(sum(map(any, drawn)) / len(drawn))
    found = figures.pass_at(prompts, k)
    assert found.value == pytest.approx(np.mean(expected)) and found.prompts == len(expected)


def test_perplexity_and_its_standard_error() -> None:
    generator = np.random.default_rng(0)
    tokens = generator.integers(5, 40, 400)
    logprobs = -tokens * generator.normal(2.0, 0.3, 400)
    found = figures.perplexity(logprobs.tolist(), tokens.tolist())
    assert found.value == pytest.approx(math.exp(-logprobs.sum() / tokens.sum()))
    drawn = [generator.integers(0, 400, 400) for _ in range(2000)]
    again = [math.exp(-logprobs[chosen].sum() / tokens[chosen].sum()) for chosen in drawn]
    assert found.stderr == pytest.approx(np.std(again), rel=0.1)
