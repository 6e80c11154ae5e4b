"""A reward server that is busy, has moved, or answers slowly: what is tried again, followed, waited for, refused."""

from __future__ import annotations

import email.utils
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import run
from engine.config import Config, ConfigError
from engine.rewards import RewardError, server
from engine.rewards.server import ServerReward
from engine.sample import Sample
from tests import users
from tests.reward_servers import Answer, serving

FINE: Answer = (200, {}, {"scores": [1.0, 2.0]})


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "FIRST_WAIT", 0.001)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def asked(url: str, **reward: Any) -> list[float | None]:
    config = Config.model_validate({"reward": {"url": url, **reward}})
    return ServerReward(config)([Sample(i, i, [1], {"prompt": f"p  {i}"}, [2], "stop") for i in range(2)])


def seconds(call: Callable[[], Any]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_what_may_pass_is_tried_again(status: int) -> None:
    answers = iter([(status, {}, b"later")] * 3 + [FINE])
    with serving(lambda *_: next(answers)) as url:
        assert asked(url) == [1.0, 2.0]
    with serving(lambda *_: (status, {}, b"later")) as url, pytest.raises(RewardError, match=f"status {status}: 'la"):
        asked(url)


@pytest.mark.parametrize("status", [400, 401, 404, 409, 413, 422])
def test_what_will_not_pass_is_refused_at_once(status: int) -> None:
    requests: list[str] = []
    with serving(lambda path, _: (requests.append(path), (status, {}, b"no"))[1]) as url:
        with pytest.raises(RewardError, match=f"refused the request with status {status}"):
            asked(url)
    assert len(requests) == 1


def test_a_wait_in_seconds_or_until_a_date() -> None:
    def date(ahead: float) -> str:
        return email.utils.formatdate(time.time() + ahead, usegmt=True)

    for headers in (
        lambda: {"Retry-After": "1"},
        lambda: {"Retry-After": date(1001), "Date": date(1000)},  # a clock of its own
        lambda: {"Retry-After": date(2.5)},
    ):
        answers = iter([(429, headers(), b"later"), FINE])
        with serving(lambda *_, answers=answers: next(answers)) as url:
            assert 1.0 <= seconds(lambda url=url: asked(url)) < 4


@pytest.mark.parametrize(
    "given", ["0", "-5", "soon", "", "nan", "inf", "1e", "Wed, 21 Oct 2015 07:28:00 GMT", "Wed, 99 Oct 2015"]
)
def test_a_wait_that_says_nothing_sensible_is_none(given: str) -> None:
    answers = iter([(503, {"Retry-After": given}, b"later"), FINE])
    with serving(lambda *_: next(answers)) as url:
        assert seconds(lambda: asked(url)) < 0.9


def test_a_wait_longer_than_a_batch_has_ends_it_at_once() -> None:
    with serving(lambda *_: (429, {"Retry-After": "100000"}, b"tomorrow")) as url:
        started = time.monotonic()
        with pytest.raises(RewardError, match=r"status 429.*in 100000 s.*54 minutes.*reward.batch_timeout_minutes"):
            asked(url)
        assert time.monotonic() - started < 1


def test_a_server_that_goes_on_answering_slowly_is_bounded() -> None:
    """Never silent for reward.timeout_seconds, and never done."""
    slow = {"X-Trickle": "yes", "Content-Length": "10000"}
    with serving(lambda *_: (200, slow, b" " * 200)) as url:
        started = time.monotonic()
        with pytest.raises(RewardError, match=r"has not scored 2 responses after 0.005 minutes"):
            asked(url, batch_timeout_minutes=0.005, timeout_seconds=5)
        assert time.monotonic() - started < 2
    with serving(lambda *_: (429, {"Retry-After": "0.2"}, b"later")) as url:
        with pytest.raises(RewardError, match=r"after the 0.005 minutes|has not scored"):
            asked(url, batch_timeout_minutes=0.005)


@pytest.mark.parametrize("status", [307, 308])
def test_a_moved_server_is_followed_with_the_body(status: int) -> None:
    bodies = []

    def answer(path: str, body: dict[str, Any]) -> Answer:
        bodies.append(body)
        targets = {"/score": "/two?x=1", "/two?x=1": other + "/three", "/three": "four"}
        return (status, {"Location": targets[path]}, b"") if path in targets else FINE

    with serving(answer) as second:
        other = second.removesuffix("/score")
        with serving(answer) as url:
            assert asked(url) == [1.0, 2.0]
    assert len(bodies) == 4 and all(body == bodies[0] for body in bodies)
    assert bodies[0]["raw_prompts"] == ["p  0", "p  1"]


@pytest.mark.parametrize(
    "status,headers,needle",
    [
        (307, {"Location": "/score"}, "redirects more than 5 times"),
        (307, {}, "Location None cannot be followed"),
        (308, {"Location": "ftp://127.0.0.1/x"}, "'ftp://127.0.0.1/x' cannot be followed"),
        (301, {"Location": "http://new.example/score"}, "status 301 and Location 'http://new.example/score'"),
        (302, {"Location": "/login"}, "status 302 and Location '/login'"),
        (303, {"Location": "/see"}, "status 303 and Location '/see'"),
    ],
)
def test_where_a_request_cannot_follow(status: int, headers: dict[str, str], needle: str) -> None:
    requests: list[str] = []
    with serving(lambda path, _: (requests.append(path), (status, headers, b""))[1]) as url:
        with pytest.raises(RewardError, match=needle):
            asked(url)
    assert len(requests) <= server.REDIRECTS + 1


@pytest.mark.parametrize(
    "scores,needle",
    [
        ({"0": 1.0, "1": 2.0}, r"a dict: \{'0': 1.0"),
        ("01", "a str: '01'"),
        (["1.0", "2.0"], "item 0 is a str: '1.0'"),
        ([[1.0], [2.0]], "item 0 is a list"),
        (None, "a NoneType"),
        ([1.0], "1 scores for 2"),
    ],
)
def test_scores_of_another_kind_are_refused_and_shown(scores: Any, needle: str) -> None:
    with serving(lambda *_: (200, {}, {"scores": scores})) as url, pytest.raises(RewardError, match=needle) as error:
        asked(url)
    assert f"reward.url {url}" in str(error.value)


def test_true_and_false_are_one_and_zero() -> None:
    with serving(lambda *_: (200, {}, {"scores": [True, False]})) as url:
        assert asked(url) == [1.0, 0.0]


def test_an_answer_that_cannot_be_decoded() -> None:
    with serving(lambda *_: (200, {"Content-Encoding": "gzip"}, b"not gzip")) as url:
        with pytest.raises(RewardError, match=r"DecodingError"):
            asked(url)


@pytest.mark.parametrize("url", ["http://", "http:///score", "http://x:port/", "http://[::1/"])
def test_what_is_no_url_is_refused_before_anything_loads(url: str) -> None:
    with pytest.raises(ConfigError, match=r"reward.url"):
        ServerReward(Config.model_validate({"reward": {"url": url}}))


def test_a_run_goes_on_through_a_busy_and_a_moved_server(tmp_path: Path) -> None:
    model = users.model_folder(tmp_path / "model")
    answers = iter([(429, {"Retry-After": "1"}, b""), (408, {}, b""), (307, {"Location": "/new"}, b"")])

    def answer(path: str, body: dict[str, Any]) -> Answer:
        scores = [float(len(text)) for text in body["completions"]]
        return next(answers, (200, {}, {"scores": scores}))

    with serving(answer) as url:
        given = users.arguments(tmp_path, model, "--reward.url", url)
        place = given.index("--reward.function")
        assert run.main(given[:place] + given[place + 2 :]) == 0
    assert next(answers, None) is None and (tmp_path / "runs/run/model").exists()


def test_a_row_that_json_cannot_hold_is_refused_at_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import datetime

    import pyarrow as pa
    import pyarrow.parquet as pq

    model, data = users.model_folder(tmp_path / "m"), tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["a b"] * 4, "when": [datetime.datetime(2026, 1, 1)] * 4}), data)
    more = ("--data.path", str(data), "--reward.function", "null", "--reward.url", "http://127.0.0.1:9/score")
    capsys.readouterr()
    assert run.main(users.arguments(tmp_path, model, *more)) == 2
    said = capsys.readouterr().err
    assert "'when'" in said and "JSON" in said and said.count("\n") == 1 and not (tmp_path / "runs").exists()
