"""Whole command lines: what is wrong with prompts is one line with status 2, and what is right is trained on."""

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest

from engine import run
from engine.data.prompts import load_tokenizer
from tests import users

pytestmark = pytest.mark.usefixtures("without_pictures")

CHAT = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role is not supported') }}"
    "{% endif %}<turn> {{ m['content'] }} </s> {% endfor %}<turn> <u5>"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = users.model_folder(tmp_path_factory.mktemp("model"))
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = CHAT
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>", "<u5>"]})
    tokenizer.save_pretrained(folder)
    return folder


def messages(content: Any, role: str = "user") -> dict[str, Any]:
    return {"prompt": [{"role": role, "content": content}]}


@pytest.mark.parametrize(
    "bad,needles",
    [
        ({"prompt": None}, ["line 13 (row 12 counted from 0)", "null"]),
        ({"prompt": [-1, 8]}, ["line 13", "negative"]),
        ({"prompt": [True, False]}, ["line 13", "bool"]),
        ({"prompt": [8, 16]}, ["line 13", "beyond the model's 16 tokens"]),
        ({"prompt": "a \ud800"}, ["line 13", "surrogate"]),
        (messages(None), ["line 13", "content", "null"]),
        (messages("a", "system"), ["line 13", "System role is not supported"]),
    ],
)
def test_a_row_that_is_no_prompt_is_one_line(
    model: Path, tmp_path: Path, bad: dict[str, Any], needles: list[str]
) -> None:
    rows = [{"prompt": "a b"}] * 12 + [bad]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert run.main(users.arguments(tmp_path, model, rows=rows)) == 2
    assert not (tmp_path / "runs" / "run").exists()
    assert said.getvalue().count("\n") == 1 and all(needle in said.getvalue() for needle in ["data.jsonl", *needles])


def test_a_wrong_column_names_those_of_the_file(model: Path, tmp_path: Path) -> None:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert run.main(users.arguments(tmp_path, model, "--data.prompt_column", "typo")) == 2
    assert not (tmp_path / "runs" / "run").exists()
    assert said.getvalue().count("\n") == 1 and "data.jsonl" in said.getvalue() and "prompt, answer" in said.getvalue()


def test_what_a_reward_sees_of_messages(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names of control tokens are text, and what the template prefilled is in the prompts."""
    (tmp_path / "reward.py").write_text(
        "def score(prompts, prompt_ids, **columns):\n"
        "    assert all(text.endswith('<turn> <u5>') for text in prompts), prompts\n"
        "    assert all(ids.count(2) == 1 and ids.count(3) == 2 and ids[-1] == 5 for ids in prompt_ids), prompt_ids\n"
        "    return [float(i) for i in range(len(prompts))]\n"
    )
    rows = [messages("a </s> <turn> b"), messages([{"type": "text", "text": "a "}, {"type": "text", "text": "b"}])] * 4
    assert run.main(users.arguments(tmp_path, model, "--train.steps", "1", rows=rows)) == 0
    said = capsys.readouterr().out
    assert "4 training prompts hold names of control tokens" in said and "Responses end with </s> (2)" in said
