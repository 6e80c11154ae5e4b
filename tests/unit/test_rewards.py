"""Scores: what is asked of a reward function, and what comes of truncated responses."""

from pathlib import Path

import pytest

from engine import rewards
from engine.config import Config, ConfigError
from engine.sample import Sample


def samples(reasons: str) -> list[Sample]:
    return [
        Sample(
            index=i,
            group_id=i,
            prompt_ids=[1],
            response_ids=[2],
            finish_reason="length" if r == "L" else "stop",
            prompt_text=f"p{i}",
            response_text=f"r{i}",
            columns={"prompt": f"p{i}", "answer": str(i)},
        )
        for i, r in enumerate(reasons)
    ]


def test_function_gets_texts_ids_and_columns() -> None:
    got = {}

    def function(**arguments: list) -> list[float]:
        got.update(arguments)
        return [0.5, 1]

    batch = samples("SS")
    rewards.score(batch, function, Config())
    assert got == {
        "prompts": ["p0", "p1"],
        "completions": ["r0", "r1"],
        "completion_ids": [[2], [2]],
        "answer": ["0", "1"],
    }
    assert [s.reward for s in batch] == [0.5, 1.0] and batch[0].reward_parts == {"score": 0.5}


@pytest.mark.parametrize(
    "rollout,clip,expected",
    [
        ({}, None, [3.0, 3.0]),
        ({"missing_eos_penalty": 1.5}, None, [3.0, 1.5]),
        ({"missing_eos_reward": -1.0}, None, [3.0, -1.0]),
        ({"missing_eos_penalty": 1.5}, 2.0, [2.0, 0.5]),
    ],
)
def test_truncated_responses_and_clipping(rollout: dict, clip: float | None, expected: list[float]) -> None:
    batch = samples("SL")
    config = Config.model_validate({"rollout": rollout, "reward": {"clip": clip}})
    rewards.score(batch, lambda **_: [3.0, 3.0], config)
    assert [s.reward for s in batch] == expected


@pytest.mark.parametrize(
    "scores,needle", [([1.0], "1 scores for 2"), ([1.0, float("nan")], "'p1'"), ([float("inf"), 1.0], "'p0'")]
)
def test_faulty_scores_are_errors(scores: list[float], needle: str) -> None:
    with pytest.raises(rewards.RewardError, match=needle):
        rewards.score(samples("SS"), lambda **_: scores, Config())


def test_function_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def shout(completions, **_):\n    return [len(c) for c in completions]\n")
    load = lambda spec: rewards.load(Config.model_validate({"reward": {"function": spec}}))  # noqa: E731
    assert load(f"{tmp_path}/mine.py:shout")(completions=["abc"]) == [3]
    with pytest.raises(ConfigError, match="whisper"):
        load(f"{tmp_path}/mine.py:whisper")
    with pytest.raises(ConfigError, match="no_such_module"):
        load("no_such_module:f")


def test_only_the_prompt_column_is_left_out() -> None:
    seen = {}
    batch = samples("S")
    batch[0].columns = {"question": "q", "prompt": "another column"}
    config = Config.model_validate({"data": {"prompt_column": "question"}})
    rewards.score(batch, lambda **arguments: [seen.update(arguments) or 1.0], config)
    assert seen["prompt"] == ["another column"] and "question" not in seen


@pytest.mark.parametrize("returned", [None, [None, 1.0], 1.0, [[1.0], [2.0]], ["a", "b"]])
def test_what_is_no_list_of_numbers_is_named(returned: object) -> None:
    with pytest.raises(rewards.RewardError, match="one number a response"):
        rewards.score(samples("SS"), lambda **_: returned, Config())  # type: ignore[arg-type,return-value]


def test_numpy_and_torch_scores_are_fine() -> None:
    import numpy as np
    import torch

    for scores in (np.array([1.0, 2.0]), torch.tensor([1.0, 2.0]), (True, 2)):
        batch = samples("SS")
        rewards.score(batch, lambda scores=scores, **_: scores, Config())
        assert [s.reward for s in batch] == [1.0, 2.0]


def test_a_column_cannot_take_an_argument_s_name() -> None:
    batch = samples("S")
    batch[0].columns["completions"] = "x"
    with pytest.raises(rewards.RewardError, match="'completions'"):
        rewards.score(batch, lambda **_: [1.0], Config())
