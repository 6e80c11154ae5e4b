"""A user's reward file is ordinary Python: how it is found and called, what it may return, and when it is stopped."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import fractions
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import rewards
from engine.config import Config, ConfigError
from engine.config.user_code import PREFIX
from engine.rewards.function import FunctionReward, load_function
from engine.sample import Sample


def samples(count: int, **columns: Any) -> list[Sample]:
    return [
        Sample(i, i, [1, 3], {"prompt": f"p  {i}"} | columns, [2], "stop", prompt_text=f"p {i}", response_text=f"r{i}")
        for i in range(count)
    ]


def written(file: Path, text: str, name: str = "score") -> str:
    file.write_text(text)
    return f"{file}:{name}"


def scored(function: Callable[..., Any], count: int = 2, seconds: float = 60.0, **columns: Any) -> list[Any]:
    return FunctionReward(function, "prompt", "reward.function 'r.py:score'", seconds)(samples(count, **columns))


DATACLASS = """
from __future__ import annotations
from dataclasses import dataclass, field
from typing import ClassVar, get_type_hints
@dataclass
class Answer:
    limit: ClassVar[int] = 3
    text: str = ""
    parts: list[str] = field(default_factory=list)
assert get_type_hints(Answer)["text"] is str
def score(completions, **columns):
    return [float(len(Answer(text).text)) for text in completions]
"""
POOL = """
import multiprocessing, os
def one(text):
    return float(len(text)), os.getpid()
def score(completions, **columns):
    with multiprocessing.get_context({method!r}).Pool(2) as pool:
        found = pool.map(one, completions)
    assert all(process != os.getpid() for _, process in found)
    return [length for length, _ in found]
"""


@pytest.mark.parametrize("name", ["reward.py", "my-reward.py", "my reward.py", "math.py", "r.1.py", "prämie.py"])
def test_dataclasses_with_postponed_annotations_in_a_file_of_any_name(tmp_path: Path, name: str) -> None:
    assert scored(load_function(written(tmp_path / name, DATACLASS))) == [2.0, 2.0]
    assert "math" not in sys.modules or not str(getattr(sys.modules["math"], "__file__", "")).startswith(str(tmp_path))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_its_own_functions_in_a_pool_of_processes(tmp_path: Path, method: str) -> None:
    function = load_function(written(tmp_path / "my-reward.py", POOL.format(method=method)))
    assert scored(function) == [2.0, 2.0]


def test_a_neighbour_and_two_files_of_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = []
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        (tmp_path / place / f"beside_{place}.py").write_text(f"def mark(): return '{place}'\n")
        text = f"import beside_{place}\ndef score(**_):\n    from beside_{place} import mark\n    return mark()\n"
        functions.append(load_function(written(tmp_path / place / "reward.py", text)))
    assert [one() for one in functions] == ["one", "two"]
    monkeypatch.chdir(tmp_path / "two")
    assert load_function("reward.py:score")() == "two", "a relative path"
    (tmp_path / "two" / "reward.py").write_text("def score(**_): return 'anew, edited'\n")
    assert load_function("reward.py:score")() == "anew, edited"
    assert all(name.endswith("reward%2Epy") for name in (one.__module__.removeprefix(PREFIX) for one in functions))


@pytest.mark.parametrize(
    "text,name,needles",
    [
        ("def score(:\n", "score", ["line 1: SyntaxError"]),
        ("\nimport no_such_thing\n", "score", ["line 2: ModuleNotFoundError", "no_such_thing"]),
        ("import sys\nsys.exit('usage: none')\n", "score", ["line 2: SystemExit: usage: none"]),
        ("def f():\n  raise OSError('gone\\naway')\nf()\n", "score", ["line 2: OSError: gone away"]),
        ("raise BaseException\n", "score", ["BaseException"]),
        ("def score(**_): return []\ndef rate(**_): return []\n", "scroe", ["has no 'scroe'; did you mean 'score'?"]),
        ("def one(**_): return []\ndef two(**_): return []\nx = 1\n", "typo", ["has no 'typo'; it has one, two"]),
        ("", "typo", ["has no 'typo'"]),
        ("score = 3.5\n", "score", ["is not callable but a float"]),
        ("class score:\n  pass\n", "score", ["is a class"]),
    ],
)
def test_what_cannot_be_imported_is_named_in_one_line(tmp_path: Path, text: str, name: str, needles: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_function(written(tmp_path / "mine.py", text, name))
    message = str(error.value)
    assert "\n" not in message and "mine.py" in message and all(needle in message for needle in needles), message


def test_arguments_are_those_that_it_names() -> None:
    def few(completions: list[str], answer: list[str], rate: float = 2.0, *, raw_prompts: list[str]) -> list[float]:
        assert completions == ["r0", "r1"] and raw_prompts == ["p  0", "p  1"] and answer == ["x", "x"]
        return [rate, rate]

    assert scored(few, answer="x", other=1) == [2.0, 2.0]

    def lacks(answer: list[Any], **_: Any) -> list[float]:
        assert answer == [None, None], "a column that none of these rows has"
        return [1.0, 1.0]

    assert scored(lacks) == [1.0, 1.0]


@pytest.mark.parametrize(
    "function,columns,needle",
    [
        (lambda x: x, ["answer"], "needs the argument x, but is called with prompts, .*raw_prompts, answer"),
        (lambda completions, truth, **_: [], ["prompt", "answer"], "needs the argument truth"),
        (lambda completions, prompt, **_: [], ["prompt"], "needs the argument prompt"),
        (lambda **_: [], ["completions"], "column 'completions'"),
        (lambda **_: [], ["prompt_ids"], "column 'prompt_ids'"),
        (lambda **_: [], ["raw_prompts"], "column 'raw_prompts'"),
    ],
)
def test_arguments_that_it_is_not_given_and_columns_in_their_place(
    function: Any, columns: list[str], needle: str
) -> None:
    with pytest.raises(ConfigError, match=needle):
        FunctionReward(function, "prompt").check_columns(columns)
    FunctionReward(lambda completions, answer: [], "prompts").check_columns(["prompts", "answer"])


def test_positional_arguments_are_refused() -> None:
    def function(completions: list[str], /, **_: Any) -> list[float]:
        return []

    with pytest.raises(ConfigError, match="takes completions by position"):
        FunctionReward(function, "prompt")


def test_what_it_does_to_its_arguments_stays_its_own() -> None:
    batch = samples(2, messages=[{"role": "user"}])

    def spoils(prompts: list[str], completion_ids: list[Any], prompt_ids: list[Any], messages: list[Any]) -> list[int]:
        prompts.clear()
        completion_ids[0].clear()
        prompt_ids[0][0] = 9
        messages[0][0]["role"] = "system"
        return [1, 2]

    FunctionReward(spoils, "prompt")(batch)
    assert batch[0].prompt_ids == [1, 3] and batch[0].response_ids == [2]
    assert batch[0].columns["messages"] == [{"role": "user"}] and batch[0].prompt_text == "p 0"


@pytest.mark.parametrize(
    "returned",
    [
        [1.0, 2],
        (1, 2.0),
        np.array([1, 2]),
        np.array([[1.0], [2.0]], np.float16),
        torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        torch.tensor([[1.0], [2.0]], requires_grad=True),
        [torch.tensor(1.0), torch.tensor([2.0])],
        [np.float32(1), fractions.Fraction(2)],
        [True, 2],
        (one for one in (1.0, 2.0)),
        map(float, ("1", "2")),
        {"a": 1, "b": 2}.values(),
    ],
)
def test_numbers_come_in_many_ways(returned: Any) -> None:
    assert scored(lambda **_: returned) == [1.0, 2.0]


class Odd:
    def __repr__(self) -> str:
        raise RuntimeError("no picture of this one")


@pytest.mark.parametrize(
    "returned,needle",
    [
        ({0: 1.0, 1: 0.0}, r"a dict: \{0: 1.0, 1: 0.0\}"),
        (collections.OrderedDict(a=1, b=2), "an OrderedDict"),
        ({0.5, 1.5}, r"a set: \{0.5, 1.5\}"),
        ({"a": 1, "b": 2}.keys(), "a dict_keys"),
        ("01", "a str: '01'"),
        (b"01", "a bytes: b'01'"),
        (None, "a NoneType: None"),
        (0.5, "a float: 0.5"),
        (torch.tensor(0.5), "a Tensor: tensor"),
        (np.array(["1", "2"]), r"ndarray of shape \[2\] whose item 0 is a str: '1'"),
        (["1.0", 2.0], "a list whose item 0 is a str: '1.0'"),
        ([1.0, [2.0]], r"item 1 is a list: \[2.0\]"),
        ([{"score": 1.0}, 2.0], "item 0 is a dict"),
        ([1.0, 2j], "item 1 is a complex"),
        (np.zeros((2, 2)), r"ndarray of shape \[2, 2\] whose item 0 is a ndarray of shape \[2\]"),
        (torch.zeros(1, 2), "Tensor of shape"),
        (Odd(), "an Odd"),
        ([Odd(), 1.0], "item 0 is an Odd"),
        ([1.0, 10**400], "item 1 is an int: 1"),
        (itertools.repeat(1.0), "returned 3 scores for 2"),
        ([1.0], r"1 scores for 2 responses.*\[1.0\]"),
        ([1.0, float("nan")], "returned nan for the prompt 'p 1' and the response 'r1'"),
    ],
)
def test_another_kind_of_answer_is_refused_and_shown(returned: Any, needle: str) -> None:
    with pytest.raises(rewards.RewardError, match=needle) as error:
        scored(lambda **_: returned)
    assert "r.py:score" in str(error.value) and "\n" not in str(error.value)


async def sleeps(**_: Any) -> list[float]:
    await asyncio.sleep(30)
    return [1.0, 1.0]


def swallows(**_: Any) -> list[float]:
    with contextlib.suppress(BaseException):
        time.sleep(30)
    return [1.0, 1.0]


def forgives(**_: Any) -> list[float]:
    while True:
        with contextlib.suppress(Exception):
            time.sleep(30)


def waits_for_a_process(**_: Any) -> list[float]:
    import subprocess

    subprocess.run([sys.executable, "-c", "import time; time.sleep(30)"], check=True)
    return [1.0, 1.0]


@pytest.mark.parametrize("function", [sleeps, swallows, forgives, waits_for_a_process])
def test_one_that_does_not_return_is_stopped_and_named(function: Any) -> None:
    started = time.monotonic()
    with pytest.raises(rewards.RewardError, match=r"r.py:score' has not returned.*reward.batch_timeout_minutes"):
        scored(function, seconds=0.2)
    assert time.monotonic() - started < 3
    assert scored(lambda **_: [1.0, 2.0], seconds=0.2) == [1.0, 2.0]
    time.sleep(0.3)  # the next limit has passed without harm


def test_signals_and_alarms_in_it_work_as_ever() -> None:
    """It runs in the main thread, where verifiers set alarms, and Ctrl-C ends it at once."""

    def alarmed(**_: Any) -> list[float]:
        def ring(*_: Any) -> None:
            raise TimeoutError

        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            time.sleep(10)
        except TimeoutError:
            return [0.0, 1.0]
        finally:
            signal.signal(signal.SIGALRM, before)
        return []

    assert scored(alarmed) == [0.0, 1.0]

    def interrupted(**_: Any) -> list[float]:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
        return []

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            scored(interrupted)
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_limit_is_a_little_less_than_ranks_wait() -> None:
    assert Config().scoring_seconds == 0.9 * 3600
    config = Config.model_validate({"launch": {"timeout_minutes": 10}, "reward": {"batch_timeout_minutes": 20}})
    assert config.scoring_seconds == 1200
