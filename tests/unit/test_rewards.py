"""Scores: what is asked of a function and of a server, how sources add up, and what comes of truncated responses."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import rewards
from engine.config import Config, ConfigError
from engine.rewards import server
from engine.rewards.function import FunctionReward, load_function
from engine.rewards.scorer import Scorer
from engine.sample import Sample
from engine.start import checks
from tests.reward_servers import Answer, serving


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


def by(function: Callable[..., Any], config: Config | None = None) -> Scorer:
    """A scorer with that function as its only source."""
    config = config or Config()
    return Scorer({"function": FunctionReward(function, config.data.prompt_column)}, config)


def constant(*scores: float | None) -> Callable[..., list[float | None]]:
    return lambda *_, **__: list(scores)


def test_function_gets_texts_ids_and_columns() -> None:
    got = {}

    def function(**arguments: list) -> list[float]:
        got.update(arguments)
        return [0.5, 1]

    batch = samples("SS")
    by(function).score(batch)
    assert got == {
        "prompts": ["p0", "p1"],
        "completions": ["r0", "r1"],
        "prompt_ids": [[1], [1]],
        "completion_ids": [[2], [2]],
        "raw_prompts": ["p0", "p1"],
        "answer": ["0", "1"],
    }
    assert [s.reward for s in batch] == [0.5, 1.0] and batch[0].reward_parts == {"function": 0.5, "score": 0.5}


@pytest.mark.parametrize(
    "rollout,reward,expected",
    [
        ({}, {}, [3.0, 3.0]),
        ({"missing_eos_penalty": 1.5}, {}, [3.0, 1.5]),
        ({"missing_eos_reward": -1.0}, {}, [3.0, -1.0]),
        ({"missing_eos_penalty": 1.5}, {"clip": 2.0}, [2.0, 0.5]),
        ({}, {"clip": 2.0, "scale": 5.0}, [10.0, 10.0]),
        ({"missing_eos_penalty": 1.5}, {"clip": 2.0, "scale": 5.0}, [10.0, 8.5]),
        ({"missing_eos_reward": -1.0}, {"clip": 2.0, "scale": 5.0}, [10.0, -1.0]),
        ({}, {"weights": {"function": -2.0}, "clip": 4.0, "scale": 0.5}, [-2.0, -2.0]),
    ],
)
def test_weight_then_clip_then_scale_then_truncation(rollout: dict, reward: dict, expected: list[float]) -> None:
    batch = samples("SL")
    config = Config.model_validate({"rollout": rollout, "reward": reward})
    by(constant(3.0, 3.0), config).score(batch)
    assert [s.reward for s in batch] == expected
    raw = 3.0 * config.reward.weights.get("function", 1.0)
    assert all(s.reward_parts == {"function": 3.0, "score": raw} for s in batch)


def test_sources_add_up_by_weight_and_none_of_them_drops() -> None:
    config = Config.model_validate(
        {
            "reward": {"function": "m:f", "model": "x", "url": "http://x", "weights": {"model": 0.5, "url": -1}},
            "rollout": {"missing_eos_reward": -1.0},
        }
    )
    sources = {
        "function": constant(1.0, 1.0, 1.0, None),
        "model": constant(4.0, None, 4.0, None),
        "url": constant(0.25, 7.0, None, None),
    }
    batch = samples("SSLS")
    Scorer(sources, config).score(batch)
    assert [s.reward for s in batch] == [1.0 + 2.0 - 0.25, None, None, None]
    assert batch[0].reward_parts == {"function": 1.0, "model": 4.0, "url": 0.25, "score": 2.75}
    assert [s.reward_parts for s in batch[1:]] == [{"function": 1.0, "url": 7.0}, {"function": 1.0, "model": 4.0}, {}]
    got = rewards.means(batch, config, torch.clone)
    assert got == {
        "reward/function_mean": 1.0,
        "reward/model_mean": 4.0,
        "reward/model_refused_fraction": 0.5,
        "reward/url_mean": 3.625,
    }
    assert rewards.means([], config, torch.clone).keys() == got.keys(), "a rank without samples joins the same sums"


def test_the_verifier_is_a_score_without_parts() -> None:
    config = Config.model_validate({"data": {"task": "addition"}})
    assert config.has_verifier and config.reward.sources == []
    batch = samples("SS")
    batch[1].response_text = "1"
    rewards.load(config, world=None).score(batch)  # type: ignore[arg-type]
    assert [s.reward_parts for s in batch] == [{"score": 0.0}, {"score": 1.0}] and batch[1].reward == 1.0
    assert rewards.means(batch, config, torch.clone) == {}
    for source in ({"function": "math:sqrt"}, {"model": "x"}, {"url": "http://x"}):
        assert not Config.model_validate({"data": {"task": "addition"}, "reward": source}).has_verifier


def test_none_for_all_is_an_answer_and_no_sample_is_no_call() -> None:
    batch = samples("SS")
    by(constant(None, None)).score(batch)
    assert [s.reward for s in batch] == [None, None]
    by(lambda **_: pytest.fail("called")).score([])


@pytest.mark.parametrize(
    "scores,needle",
    [([1.0], "1 scores for 2"), ([1.0, float("nan")], "'p1'"), ([float("inf"), 1.0], "'p0'"), ([None, -1e999], "'r1'")],
)
def test_faulty_scores_are_errors(scores: list[float], needle: str) -> None:
    with pytest.raises(rewards.RewardError, match=needle):
        by(constant(*scores)).score(samples("SS"))


def test_function_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def shout(completions, **_):\n    return [len(c) for c in completions]\nx = 1\n")
    assert load_function(f"{tmp_path}/mine.py:shout")(completions=["abc"]) == [3]
    for name, needle in (("whisper", "whisper"), ("x", "not callable")):
        with pytest.raises(ConfigError, match=needle):
            load_function(f"{tmp_path}/mine.py:{name}")
    with pytest.raises(ConfigError, match="no_such_module"):
        load_function("no_such_module:f")


def test_a_function_may_be_async() -> None:
    async def one(text: str) -> float | None:
        await asyncio.sleep(0)
        return None if text == "r1" else len(text)

    async def function(completions: list[str], **_: Any) -> list[float | None]:
        return await asyncio.gather(*map(one, completions))

    for _ in range(2):
        batch = samples("SS")
        by(function).score(batch)
        assert [s.reward for s in batch] == [2.0, None]

    async def faulty(**_: Any) -> list[float]:
        return [1.0]

    with pytest.raises(rewards.RewardError, match="1 scores for 2"):
        by(faulty).score(samples("SS"))


def test_only_the_prompt_column_is_left_out() -> None:
    seen = {}
    batch = samples("S")
    batch[0].columns = {"question": "q", "prompt": "another column"}
    config = Config.model_validate({"data": {"prompt_column": "question"}})
    by(lambda **arguments: [seen.update(arguments) or 1.0], config).score(batch)
    assert seen["prompt"] == ["another column"] and "question" not in seen


@pytest.mark.parametrize("returned", [None, 1.0, [[1.0], [2.0]], ["a", "b"], {"a": 1, "b": 2}, [1.0, 10**400]])
def test_what_is_no_list_of_numbers_is_named(returned: object) -> None:
    with pytest.raises(rewards.RewardError, match="one number a response"):
        by(lambda **_: returned).score(samples("SS"))


def test_numpy_and_torch_scores_are_fine() -> None:
    import numpy as np

    for scores in (np.array([1.0, 2.0]), torch.tensor([1.0, 2.0]), (True, 2)):
        batch = samples("SS")
        by(lambda scores=scores, **_: scores).score(batch)
        assert [s.reward for s in batch] == [1.0, 2.0]


@pytest.mark.parametrize(
    "reward,needle",
    [
        ({}, "reward.function, reward.model or reward.url is missing"),
        ({"url": "localhost:80"}, "must start with http"),
        ({"url": "http://x", "weights": {"model": 2}}, "names 'model', but reward.model is not given"),
        ({"model": "./nowhere"}, "reward.model: there is no './nowhere'"),
        ({"function": "no_such_module:f", "url": "http://x"}, "no_such_module"),
    ],
)
def test_sources_are_checked_before_anything_loads(reward: dict, needle: str) -> None:
    config = Config.model_validate({"data": {"path": "some/set"}, "model": {"path": "x"}, "reward": reward})
    with pytest.raises(ConfigError, match=needle):
        checks.check(config, 1, "cpu")


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "FIRST_WAIT", 0.001)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def asked(url: str, batch: list[Sample], **reward: Any) -> list[float | None]:
    config = Config.model_validate({"reward": {"url": url, **reward}})
    rewards.load(config, world=None).score(batch)  # type: ignore[arg-type]
    return [sample.reward for sample in batch]


def asked_for(prompts: list[str], completions: list[str], answer: list[str]) -> dict[str, list[str]]:
    return {"prompts": prompts, "completions": completions, "raw_prompts": prompts, "answer": answer}


def test_server_scores_batches_at_a_time() -> None:
    bodies, together = [], threading.Barrier(3, timeout=20)

    def answer(_: str, body: dict) -> Answer:
        bodies.append(body)
        together.wait()
        return 200, {}, {"scores": [None if text == "r3" else int(text[1:]) for text in body["completions"]]}

    with serving(answer) as url:
        assert asked(url, samples("SSSSS"), batch_size=2) == [0.0, 1.0, 2.0, None, 4.0]
        assert asked(url, []) == []
    assert sorted(bodies, key=lambda body: body["answer"]) == [
        asked_for(["p0", "p1"], ["r0", "r1"], ["0", "1"]),
        asked_for(["p2", "p3"], ["r2", "r3"], ["2", "3"]),
        asked_for(["p4"], ["r4"], ["4"]),
    ]


@pytest.mark.parametrize("status", [500, 503, 0])
def test_server_errors_and_lost_connections_are_tried_again(status: int) -> None:
    answers = iter([(status, {}, {})] * (server.ATTEMPTS - 1) + [(200, {}, {"scores": [1, 2]})])
    with serving(lambda *_: next(answers)) as url:
        assert asked(url, samples("SS")) == [1.0, 2.0]
    with serving(lambda *_: (status, {}, b"out of memory")) as url, pytest.raises(rewards.RewardError) as error:
        asked(url, samples("SS"))
    assert url in str(error.value) and f"in {server.ATTEMPTS} attempts" in str(error.value)
    assert ("RemoteProtocolError" if status == 0 else f"status {status}: 'out of memory'") in str(error.value)


def test_a_server_that_is_not_there_or_silent() -> None:
    with serving(lambda *_: (200, {}, {})) as url:
        pass
    with pytest.raises(rewards.RewardError, match=f"{url} gave no scores.*ConnectError"):
        asked(url, samples("S"))
    over = threading.Event()
    with serving(lambda *_: (200, {}, {"scores": [over.wait(20)]})) as url:
        with pytest.raises(rewards.RewardError, match=f"{url} gave no scores.*ReadTimeout"):
            asked(url, samples("S"), timeout_seconds=0.05)
        over.set()


@pytest.mark.parametrize(
    "status,content,needle",
    [
        (404, b"no such page", "status 404: 'no such page'"),
        (302, b"", "status 302"),
        (200, b"<html>", "it answered '<html>'"),
        (200, {"score": [1, 2]}, "must answer"),
        (200, [1, 2], "must answer"),
        (200, {"scores": [1]}, "1 scores for 2"),
        (200, {"scores": "good"}, "one number a response"),
        (200, {"scores": [1, float("nan")]}, "'p1'"),
    ],
)
def test_bad_answers_are_errors_at_once(status: int, content: Any, needle: str) -> None:
    requests = []
    with serving(lambda _, body: (requests.append(body), (status, {}, content))[1]) as url:
        with pytest.raises(rewards.RewardError, match=needle) as error:
            asked(url, samples("SS"))
    assert f"reward.url {url}" in str(error.value) and len(requests) == 1


@pytest.mark.parametrize("column", [b"bytes", float("nan")])
def test_columns_that_json_cannot_hold_are_named(column: object) -> None:
    batch = samples("S")
    batch[0].columns["answer"] = column
    with pytest.raises(rewards.RewardError, match="no JSON"):
        asked("http://127.0.0.1:1", batch)
