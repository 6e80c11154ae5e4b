"""Held-out rows by a hash of their prompts, and mixtures of data sets in proportion to weights."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from engine.config import Config, ConfigError, cli
from engine.data.prompts import load_prompts
from engine.data.stream import Mixed, Part, Stream, over
from engine.data.training_rows import load_rows
from engine.start import checks, preflight
from tests import users
from tests.unit.test_data_files import options, refusal

PROMPTS = [" ".join(random.Random(i).choices(users.WORDS, k=6)) for i in range(400)]


def config(*, algo: str = "ppo", rollout: dict[str, Any] | None = None, **data: Any) -> Config:
    """A run's settings, as far as data are concerned, checked like a run's."""
    tree: dict[str, Any] = {"algo": algo, "data": data, "model": {"path": "/"}}
    if algo == "ppo":
        tree |= {"reward": {"url": "http://x"}, "rollout": {"prompts_per_step": 4} | (rollout or {})}
    made = Config.model_validate(tree)
    checks.check(made, 1, "cpu")
    made.model.path = None
    return made


def split(path: Path, **data: Any) -> tuple[set[str], set[str]]:
    """The texts of the prompts to train on and of the held-out ones."""
    train, held_out, _ = load_prompts(config(path=str(path), **data), users.tokenizer())
    return {one.text for one in train}, {one.text for one in held_out}


def test_what_is_held_out_depends_on_the_prompt_alone(tmp_path: Path) -> None:
    rows = [{"prompt": prompt, "n": n} for n in range(2) for prompt in PROMPTS]
    train, held_out = split(users.write_rows(tmp_path / "a.jsonl", rows), eval_fraction=0.25)
    assert not train & held_out and 0.18 < len(held_out) / len(PROMPTS) < 0.32
    fewer, _ = rows[:600:3], random.Random(1).shuffle(rows)
    some, some_held_out = split(users.write_rows(tmp_path / "b.jsonl", fewer), eval_fraction=0.25)
    assert some <= train and some_held_out <= held_out
    assert split(users.write_rows(tmp_path / "c.jsonl", rows), eval_fraction=0.25) == (train, held_out)
    more = split(users.write_rows(tmp_path / "d.jsonl", rows), eval_fraction=0.5)[1]
    assert held_out < more, "a larger share holds out the same rows and others"


def chat(prompt: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


@pytest.mark.parametrize(
    "algo,row",
    [
        ("sft", lambda p, a: {"prompt": p, "completion": a}),
        ("sft", lambda p, a: {"messages": chat(p, a)}),
        ("dpo", lambda p, a: {"chosen": f"{p} c {a}", "rejected": f"{p} d"}),
        ("dpo", lambda p, a: {"chosen": chat(p, a), "rejected": chat(p, "d")}),
    ],
    ids=["completions", "messages", "strings", "conversations"],
)
def test_rows_with_equal_prompts_are_on_one_side(tmp_path: Path, algo: str, row: Any) -> None:
    rows = [row(prompt, answer) for prompt in PROMPTS[:120] for answer in ("e f", "g")]
    tokenizer = users.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<turn> {{ m['content'] }} {% endfor %}"
    file = users.write_rows(tmp_path / "rows.jsonl", rows)
    train, held_out, _ = load_rows(config(algo=algo, path=str(file), eval_fraction=0.3), tokenizer)
    given = [{tuple(one.prompt_ids) for unit in part for one in unit} for part in (train, held_out)]
    assert all(given) and not given[0] & given[1] and len(train) + len(held_out) == len(rows)


def test_a_row_without_a_prompt_cannot_be_split(tmp_path: Path) -> None:
    file = users.write_rows(tmp_path / "rows.jsonl", [{"completion": "a"}])
    with pytest.raises(ConfigError, match=r"rows\.jsonl line 1 .*data\.eval_fraction"):
        load_rows(config(algo="sft", path=str(file), eval_fraction=0.3), users.tokenizer())


def mixed(sizes: list[int], weights: list[float], seed: int = 0) -> Stream[tuple[int, int]]:
    parts = [
        Part(f"{source}", weight, [(source, item) for item in range(size)])
        for source, (size, weight) in enumerate(zip(sizes, weights, strict=True))
    ]
    return over(Mixed(parts), seed)


@pytest.mark.parametrize("weights", [[1, 1], [3, 1], [0.7, 0.2, 0.1], [1e-3, 1.0]])
def test_every_stretch_is_in_proportion_to_the_weights(weights: list[float]) -> None:
    stream = mixed([7, 30, 11][: len(weights)], weights)
    taken = [source for source, _ in stream.take(20_000)]
    for length in (4, 16, 100, 5000):
        for start in range(0, 15_000, 777):
            counts = Counter(taken[start : start + length])
            for source, weight in enumerate(weights):
                assert abs(counts[source] - length * weight / sum(weights)) < 3


def test_each_source_passes_over_itself_in_its_own_order() -> None:
    taken = mixed([7, 30], [2, 1]).take(9000)
    for source, size in ((0, 7), (1, 30)):
        own = [item for one, item in taken if one == source]
        passes = [tuple(own[i : i + size]) for i in range(0, len(own) - size + 1, size)]
        assert all(sorted(one) == list(range(size)) for one in passes) and len(set(passes)) > 0.9 * len(passes)
    other = mixed([7, 30], [2, 1], seed=1).take(9000)
    assert [one for one, _ in other] != [one for one, _ in taken] and other != taken


def test_a_mixture_goes_on_from_its_cursor() -> None:
    whole, late = mixed([7, 30], [2, 1]).take(9000), mixed([7, 30], [2, 1])
    late.cursor = 8190  # beyond the first blocks of positions
    assert late.take(8) == whole[8190:8198] and late.at(5) == whole[5] and late.take(3) == whole[8198:8201]
    late.cursor = 0
    assert set(late.ahead(40)) == set(whole[:40])


def test_sources_have_columns_of_their_own(tmp_path: Path) -> None:
    users.write_rows(tmp_path / "a.jsonl", [{"prompt": p, "answer": "a"} for p in PROMPTS[:60]])
    users.write_rows(tmp_path / "b.jsonl", [{"question": p, "answer": "b"} for p in PROMPTS[40:]])
    mixture = [{"path": str(tmp_path / "a.jsonl"), "weight": 3}]
    mixture += [{"path": str(tmp_path / "b.jsonl"), "prompt_column": "question"}]
    settings = config(mixture=mixture, eval_fraction=0.2)
    train, held_out, _ = load_prompts(settings, users.tokenizer())
    assert (
        isinstance(train, Mixed)
        and len(train.parts) == 2
        and not {one.text for one in train} & {one.text for one in held_out}
    )
    assert [one.columns["answer"] for one in held_out[:4]] == ["a", "b", "a", "b"], "of the sources in turns"
    assert {tuple(one.columns) for one in train} == {("prompt", "answer"), ("answer", "prompt")}
    assert "75.0%" in train.line(100) and "passes" in train.line(100)
    (tmp_path / "a.jsonl").write_text(json.dumps({"question": "a", "prompt": "b"}) + "\n")
    with pytest.raises(ConfigError, match=r"a\.jsonl line 1 .*would become 'prompt'"):
        load_prompts(config(mixture=[mixture[1] | {"path": str(tmp_path / "a.jsonl")}]), users.tokenizer())


def test_a_reward_function_gets_its_columns_from_every_source(tmp_path: Path) -> None:
    model = users.model_folder(tmp_path / "model")
    (tmp_path / "r.py").write_text("def score(completions, answer):\n    return [0.0] * len(answer)\n")
    users.write_rows(tmp_path / "a.jsonl", [{"prompt": "a", "answer": "a"}])
    users.write_rows(tmp_path / "b.jsonl", [{"prompt": "b", "solution": "b"}])
    settings = cli.validate(
        {
            "model": {"path": str(model)},
            "reward": {"function": f"{tmp_path / 'r.py'}:score"},
            "data": {"mixture": [{"path": str(tmp_path / name)} for name in ("a.jsonl", "b.jsonl")]},
        }
    )
    with pytest.raises(ConfigError, match=r"the rows of .*b\.jsonl: .*needs the argument answer"):
        preflight.read(settings)


@pytest.mark.parametrize(
    "more,needle",
    [
        (["--data.eval_fraction", "0.1", "--data.eval_path", "x.jsonl"], "give one"),
        (["--data.eval_fraction", "1"], "less than 1"),
        (["--data.mixture", "[{path: a.jsonl}]"], "exactly one of"),
    ],
)
def test_settings_about_one_data_set_that_contradict_each_other(tmp_path: Path, more: list[str], needle: str) -> None:
    file = users.write_rows(tmp_path / "p.jsonl", users.ROWS)
    assert needle in refusal(options(tmp_path, file, *more))


@pytest.mark.parametrize(
    "mixture,more,needle",
    [
        ("[{path: P, weight: 0}]", [], "data.mixture.0.weight = '0': input should be greater than 0"),
        ("[P]", [], "must be keys with their values; it reads [{key: value, ...}, ...] with the keys path"),
        ("P", [], "jsonl': must be keys with their values; it reads"),
        ("[{path: P}, {path: P, wieght: 2}]", [], "an item of data.mixture has the keys path, name"),
        ("[{weight: 2}]", [], "data.mixture.0.path"),
        ("[{path: P}, {path: no.jsonl}]", [], "data.mixture.1.path: there is no 'no.jsonl'"),
        ("[{path: P, split: test}]", [], "data.mixture.0.split: "),
        ("[{path: P}]", ["--data.split", "test"], "data.split is about data.path"),
        ("[{path: P}]", ["--data.eval_path", "P"], "data.eval_overlap"),
        ("[{path: P}]", ["--algo", "sft", "--train.epochs", "1"], "give train.steps"),
        ("[{path: P}]", ["--data.task", "addition"], "exactly one of"),
    ],
)
def test_mixtures_that_make_no_sense_are_one_line(tmp_path: Path, mixture: str, more: list[str], needle: str) -> None:
    file = str(users.write_rows(tmp_path / "p.jsonl", users.ROWS))
    arguments = [part.replace("P", file) if part == "P" else part for part in more]
    arguments = [*options(tmp_path, "x", *arguments), "--data.mixture", mixture.replace("P", file)]
    place = arguments.index("--data.path")
    del arguments[place : place + 2]
    if "sft" in arguments:
        place = arguments.index("--reward.function")
        del arguments[place : place + 2]
    assert needle in refusal(arguments)


@pytest.mark.parametrize("algo", ["sft", "ppo"])
def test_a_split_that_leaves_nothing_says_what_to_do(tmp_path: Path, algo: str) -> None:
    rows = [{"prompt": "a b c", "completion": "d"}]
    path, load = str(users.write_rows(tmp_path / "rows.jsonl", rows)), load_rows if algo == "sft" else load_prompts
    for fraction, advice in ((0.001, "raise it"), (0.999, "lower it")):
        with pytest.raises(ConfigError, match=rf"rows\.jsonl, data\.eval_fraction {fraction}: .*{advice}"):
            load(config(algo=algo, path=path, eval_fraction=fraction), users.tokenizer())
