"""What ends a response: every end of sequence that the model's files declare, the tokenizer's, and further tokens."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from engine import run
from engine.config import Config, ConfigError
from engine.data.end_of_sequence import stop_token_ids
from engine.data.prompts import load_prompts, load_tokenizer
from engine.tasks import addition
from tests import users

pytestmark = pytest.mark.usefixtures("without_pictures")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return users.model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    """A copy of the model's files without its weights."""
    copy = tmp_path / "model"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).symlink_to(file) if file.suffix == ".safetensors" else (copy / file.name).write_bytes(
            file.read_bytes()
        )
    return copy


def stops(folder: Path, *tokens: str) -> tuple[int, ...]:
    config = Config.model_validate({"model": {"path": str(folder)}, "generation": {"stop_tokens": list(tokens)}})
    return stop_token_ids(config, load_tokenizer(str(folder)))


def refusal(arguments: list[str]) -> str:
    """What a command line that is refused says, in one line."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert run.main(arguments) == 2
    assert said.getvalue().count("\n") == 1 and said.getvalue().startswith("error: "), said.getvalue()
    return said.getvalue()


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("ids", [[2, 3], [3], 3])
def test_every_declared_end_ends_a_response(folder: Path, file: str, ids: Any) -> None:
    users.edit_json(folder / file, eos_token_id=ids)
    assert set(stops(folder)) == {2, 3}


def test_ends_of_a_nested_configuration(folder: Path) -> None:
    users.edit_json(folder / "config.json", text_config={"eos_token_id": [3, 5]})
    assert set(stop_token_ids(
        Config.model_validate({"model": {"path": str(folder)}}), load_tokenizer(str(folder)), 16)
    ) == {2, 3, 5}  # fmt: skip


def test_a_run_stops_at_them_and_shows_them(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    users.edit_json(folder / "generation_config.json", eos_token_id=[2, 3])
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def score(completion_ids, **columns):\n"
        "    assert all(not {2, 3} & set(ids[:-1]) for ids in completion_ids), completion_ids\n"
        "    open(__file__ + '.log', 'a').write(''.join(f'{ids[-1]} ' for ids in completion_ids))\n"
        "    return [float(len(ids)) for ids in completion_ids]\n"
    )
    assert run.main(users.arguments(tmp_path, folder, "--rollout.max_response_tokens", "24", "--train.steps", "1")) == 0
    assert "3 " in Path(f"{reward}.log").read_text()
    assert "</s> (2), <turn> (3)" in capsys.readouterr().out


def test_no_end_at_all_is_said(folder: Path) -> None:
    for file in ("generation_config.json", "config.json"):
        users.edit_json(folder / file, eos_token_id=None)
    tokenizer = load_tokenizer(str(folder))
    tokenizer.eos_token = None
    file = users.write_rows(folder / "p.jsonl", users.ROWS)
    config = Config.model_validate({"model": {"path": str(folder)}, "data": {"path": str(file)}})
    assert stop_token_ids(config, tokenizer) == ()
    assert any("No token ends a response" in note for note in load_prompts(config, tokenizer)[2])


@pytest.mark.parametrize("value", [True, [2, True], "2", ["</s>"], -1, [2, None], 2.0, {"a": 1}, 16, [2, 99]])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_what_is_no_id_of_the_vocabulary_is_refused(folder: Path, file: str, value: Any) -> None:
    users.edit_json(folder / file, eos_token_id=value)
    config = Config.model_validate({"model": {"path": str(folder)}})
    with pytest.raises(ConfigError, match=file):
        stop_token_ids(config, load_tokenizer(str(folder)), 16)


def test_a_generation_config_that_transformers_refuses_is_named(folder: Path, tmp_path: Path) -> None:
    users.edit_json(folder / "generation_config.json", cache_implementation="nope")
    assert "its generation_config.json: ValueError: Invalid `cache_implementation`" in refusal(
        users.arguments(tmp_path, folder)
    )


def test_an_end_beyond_the_vocabulary_is_one_line(folder: Path, tmp_path: Path) -> None:
    users.edit_json(folder / "generation_config.json", eos_token_id=16)
    assert "16 tokens" in refusal(users.arguments(tmp_path, folder))


@pytest.mark.parametrize(
    "token,needle", [("<more>", "beyond"), ("a b", "2 tokens"), ("zz", "no token"), ("", "0 tokens")]
)
def test_stop_tokens_that_cannot_stop_are_refused(folder: Path, tmp_path: Path, token: str, needle: str) -> None:
    tokenizer = load_tokenizer(str(folder))
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(folder)
    assert needle in refusal(users.arguments(tmp_path, folder, "--generation.stop_tokens", json.dumps([token])))


def test_the_tokenizers_end_beyond_the_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    tokenizer.save_pretrained(folder)
    assert "beyond" in refusal(users.arguments(tmp_path, folder))


def test_further_stop_tokens_and_the_task_of_its_own() -> None:
    config = Config.model_validate({"data": {"task": "addition"}, "generation": {"stop_tokens": ["="]}})
    tokenizer = addition.tokenizer()
    assert stop_token_ids(config, tokenizer) == (tokenizer.eos_token_id, 14)
