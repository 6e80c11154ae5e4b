"""Files of prompts: which are read, what a setting about them can mean, and that every format gives the same."""

import contextlib
import gzip
import io
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine import run
from engine.config import Config, ConfigError, cli
from engine.data.prompts import Prompt, load_prompts
from engine.start import checks
from tests import users

ROW = json.dumps({"prompt": "a b c", "answer": "d"}) + "\n"


def refusal(arguments: list[str]) -> str:
    """What a command line that is refused by settings alone says: one line; no folder is made."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert run.main([*arguments, "--model.path", "/"]) == 2
    assert said.getvalue().count("\n") == 1 and said.getvalue().startswith("error: "), said.getvalue()
    return said.getvalue()


def options(tmp_path: Path, path: Any, *more: str) -> list[str]:
    """A command line with prompts from ``path``."""
    (tmp_path / "own").mkdir(exist_ok=True)
    arguments = users.arguments(tmp_path / "own", Path("/"), "--data.path", str(path), *more)
    return [part for part in arguments if part not in ("--model.path", "/")]


def load(path: Any, **settings: Any) -> tuple[list[Prompt], list[Prompt], list[str]]:
    config = Config.model_validate(
        {"model": {"path": "/"}, "reward": {"url": "http://x"}, "data": {"path": str(path)} | settings}
        | {"rollout": {"prompts_per_step": 4, "max_prompt_tokens": settings.pop("longest", 64)}}
    )
    checks.check(config, 1, "cpu")
    config.model.path = None
    tokenizer = users.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% if 'tool_calls' in m %}{% for c in "
    tokenizer.chat_template += "m['tool_calls'] %}<turn> {{ c['name'] }} {% endfor %}{% endif %}{% endfor %}"
    return load_prompts(config, tokenizer)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return users.write_rows(tmp_path / "p.jsonl", users.ROWS)


@pytest.mark.parametrize(
    "more", [("--data.eval_split", "test"), ("--data.split", "nonexistent"), ("--data.split", "x")]
)
def test_a_file_has_no_splits(tmp_path: Path, file: Path, more: tuple[str, str]) -> None:
    assert more[0][2:] in refusal(options(tmp_path, file, *more))
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "p.parquet")
    assert more[0][2:] in refusal(options(tmp_path, tmp_path / "p.parquet", *more))


def test_a_held_out_file_has_no_splits(tmp_path: Path, file: Path) -> None:
    other = users.write_rows(tmp_path / "other.jsonl", users.ROWS)
    said = refusal(options(tmp_path, file, "--data.eval_path", str(other), "--data.eval_split", "test"))
    assert "data.eval_split" in said and "other.jsonl" in said


@pytest.mark.parametrize(
    "key,value",
    [("split", "test"), ("eval_path", "x"), ("eval_split", "test"), ("prompt_column", "x"), ("templated", "true")],
)
def test_an_embedded_task_has_prompts_of_its_own(key: str, value: str) -> None:
    assert f"data.{key}" in refusal(["--data.task", "addition", f"--data.{key}", value])


def test_a_runs_own_configuration_starts_again(tmp_path: Path, file: Path) -> None:
    """It names every key, those at their defaults too."""
    config, _ = cli.parse([*options(tmp_path, file), "--model.path", "/"])
    (tmp_path / "config.yaml").write_text(cli.dump_yaml(config))
    again, _ = cli.parse(["--config", str(tmp_path / "config.yaml")])
    checks.check(again, 1, "cpu")
    assert again == config and "split: train" in cli.dump_yaml(config)


@pytest.mark.parametrize("how", ["same", "relative", "link", "hard link", "folder link"])
def test_training_rows_are_not_held_out(tmp_path: Path, file: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    other = {"same": str(file), "relative": "./p.jsonl", "folder link": "link/p.jsonl"}.get(how, "other.jsonl")
    if how == "link":
        Path(other).symlink_to(file)
    if how == "hard link":
        Path(other).hardlink_to(file)
    if how == "folder link":
        Path("link").symlink_to(tmp_path)
    assert "data.eval_overlap" in refusal(options(tmp_path, file, "--data.eval_path", other))
    prompts, held_out, notes = load(file, eval_path=other, eval_overlap=True)
    assert prompts == held_out and any("16 of 16 held-out prompts" in note for note in notes)


@pytest.mark.parametrize(
    "more",
    [
        ("--data.eval_path", "some/data"),
        ("--data.eval_split", "train"),
        ("--data.split", "test", "--data.eval_split", "test"),
        ("--data.name", "main", "--data.eval_path", "some/data", "--data.eval_name", "main"),
    ],
)
def test_the_same_split_of_a_hub_data_set_is_refused(tmp_path: Path, more: tuple[str, ...]) -> None:
    assert "data.eval_overlap" in refusal(options(tmp_path, "some/data", *more))


def test_single_shared_rows_are_counted(tmp_path: Path, file: Path) -> None:
    other = users.write_rows(
        tmp_path / "other.jsonl", [{"prompt": "a b c"}, {"prompt": "h h h h"}, {"prompt": "a  b c"}]
    )
    assert any(note.startswith("2 of 3 held-out prompts") for note in load(file, eval_path=str(other))[2])


@pytest.mark.parametrize("content", ["", "\n \n", json.dumps({"prompt": "a " * 80}) + "\n"])
@pytest.mark.parametrize("held_out", [False, True])
def test_no_prompt_left_is_refused(tmp_path: Path, file: Path, content: str, held_out: bool) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text(content)
    with pytest.raises(ConfigError, match=r"empty\.jsonl"):
        load(file, eval_path=str(empty)) if held_out else load(empty)


def test_an_empty_parquet_file_is_refused(tmp_path: Path, file: Path) -> None:
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "e.parquet")
    with pytest.raises(ConfigError, match="no rows"):
        load(file, eval_path=str(tmp_path / "e.parquet"))


@pytest.mark.parametrize("name", ["x.csv.gz", "x.jsonl.bz2", "x.ndjson", "x.csv", "x.txt", "x", "x.jsonl.bak", "gsm8k"])
@pytest.mark.parametrize("prefix", ["./", ""])
def test_a_file_that_is_there_is_no_hub_name(
    tmp_path: Path, name: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(gzip.compress(ROW.encode()) if name.endswith(".gz") else ROW.encode())
    said = refusal(options(tmp_path, prefix + name))
    assert prefix + name in said and ".jsonl or .parquet" in said and "Hub" not in said


@pytest.mark.parametrize(
    "name", ["./x.json", "no.csv", "a/b/c", "no/x.jsonl", "~/no-such-file", "s3://x/y.jsonl", "../x", ""]
)
@pytest.mark.parametrize("key", ["path", "eval_path"])
def test_what_is_not_there_and_no_hub_name_is_said(tmp_path: Path, file: Path, name: str, key: str) -> None:
    more = ["--data.eval_path", name] if key == "eval_path" else []
    said = refusal(options(tmp_path, file if more else name, *more))
    assert f"data.{key}: there is no '{name}'" in said


def test_neighbours_of_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "empty.jsonl").touch()
    for name, needle in (("folder", "folder"), ("gone", "link"), ("pipe", "regular"), ("empty", "empty")):
        assert needle in refusal(options(tmp_path, tmp_path / f"{name}.jsonl"))


def test_names_that_are_read(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upper-case suffixes, links and the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "P.JSONL").write_text(file.read_text())
    (tmp_path / "link.jsonl").symlink_to(file)
    (tmp_path / "ünï cödé.jsonl").write_text(file.read_text())
    for name in (tmp_path / "P.JSONL", tmp_path / "link.jsonl", "~/p.jsonl", tmp_path / "ünï cödé.jsonl"):
        assert len(load(name)[0]) == 16


def test_what_save_to_disk_wrote(tmp_path: Path) -> None:
    """A Dataset has no splits; a DatasetDict has, and its held-out split is no other folder's."""
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": [{"role": "user", "content": one["prompt"]}], "answer": one["answer"]} for one in users.ROWS]
    one = datasets.Dataset.from_list(rows)
    one.save_to_disk(tmp_path / "one", num_shards=2)
    datasets.DatasetDict(train=one, test=one.select([3, 4])).save_to_disk(tmp_path / "several")
    want, _, _ = load(users.write_rows(tmp_path / "p.jsonl", rows))
    assert [prompt.columns for prompt in load(tmp_path / "one")[0]] == [prompt.columns for prompt in want]
    train, held_out, _ = load(tmp_path / "several", eval_split="test")
    assert [prompt.ids for prompt in train] == [prompt.ids for prompt in want]
    assert [prompt.columns for prompt in held_out] == [prompt.columns for prompt in want[3:5]]
    for path, more, needle in (
        ("several", ("--data.split", "dev"), "no split 'dev', but train, test"),
        ("several", ("--data.eval_split", "train"), "data.eval_overlap"),
        ("several", ("--data.name", "main"), "no configurations"),
        ("one", ("--data.split", "test"), "one Dataset without splits"),
    ):
        assert needle in refusal(options(tmp_path, tmp_path / path, *more))
    (tmp_path / "one" / "data-00001-of-00002.arrow").unlink()
    assert "lacks" in refusal(options(tmp_path, tmp_path / "one"))
    (tmp_path / "one" / "state.json").write_text("{")
    assert "state.json cannot be read" in refusal(options(tmp_path, tmp_path / "one"))


def test_a_folder_of_files_is_refused_unless_it_says_which(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "data.jsonl").write_text(ROW)
    (folder / "info.json").write_text('{"prompt": "h h", "version": 1}')
    assert "README.md" in refusal(options(tmp_path, folder))
    (folder / "README.md").write_text("# Data\n")
    assert "README.md" in refusal(options(tmp_path, folder))


def listed(folder: Path, entries: Any, **files: list[dict[str, Any]]) -> Path:
    """A folder laid out as a data set of the hub."""
    folder.mkdir()
    for name, rows in files.items():
        users.write_rows(folder / f"{name}.jsonl", rows)
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(entries)}\n---\n# Data\n")
    return folder


def test_values_of_a_folder_stay_as_written(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": 7}, {"prompt": "b", "answer": "7"}, {"prompt": "c", "answer": 7.0}]
    folder = listed(tmp_path / "d", [{"config_name": "default", "data_files": "a.jsonl"}], a=rows)
    assert [repr(prompt.columns["answer"]) for prompt in load(folder)[0]] == ["7", "'7'", "7.0"]


def test_splits_of_a_folder(tmp_path: Path) -> None:
    files = [{"split": "train", "path": ["a.jsonl", "b*.jsonl"]}, {"split": "test", "path": "c.jsonl"}]
    entries = [{"config_name": "main", "data_files": files}]
    rows = {name: [{"prompt": name}] for name in ("a", "b", "c")}
    folder = listed(tmp_path / "d", entries, **rows)
    train, held_out, _ = load(folder, eval_split="test")
    assert [[one.text for one in part] for part in (train, held_out)] == [["a", "b"], ["c"]]
    for more, needle in (
        (("--data.split", "dev"), "no split 'dev', but train, test"),
        (("--data.name", "other"), "'main'"),
        (("--data.eval_split", "train"), "data.eval_overlap"),
        (("--data.eval_path", str(folder / "b.jsonl")), "data.eval_overlap"),
    ):
        assert needle in refusal(options(tmp_path, folder, *more))
    (folder / "b.jsonl").write_text('{"version": 1}\n')
    with pytest.raises(ConfigError, match="other columns"):
        load(folder)


def test_every_format_gives_the_same_tokens_and_columns(tmp_path: Path) -> None:
    """Parquet gives every object of a column the keys of all, and every row all columns."""
    call: dict[str, Any] = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"name": "b", "arguments": {"x": "1"}}],
    }
    rows: list[dict[str, Any]] = [
        {"prompt": [{"role": "user", "content": "a"}], "meta": {"level": 1}, "answer": "d"} for _ in range(20)
    ]
    rows[3] = {
        "prompt": [{"role": "user", "content": "a"}, call, {"role": "tool", "content": "c", "name": "b"}],
        "meta": {"origin": "x"},
        "extra": 7,
    }
    users.write_rows(tmp_path / "p.jsonl", rows)
    pq.write_table(
        pa.Table.from_pylist([{"answer": None, "extra": None} | row for row in rows]), tmp_path / "p.parquet"
    )
    entries = [{"config_name": "default", "data_files": "*.jsonl"}]
    listed(tmp_path / "folder", entries, a=rows)
    (tmp_path / "p.json").write_text("\ufeff\n" + json.dumps(rows, indent=1))
    (tmp_path / "lines.json").write_bytes((tmp_path / "p.jsonl").read_bytes())
    for name in ("p.jsonl", "p.json"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    lines, table, folder = (load(tmp_path / name)[0] for name in ("p.jsonl", "p.parquet", "folder"))
    for name in ("p.json", "lines.json", "p.jsonl.gz", "p.json.gz"):
        assert [(one.ids, one.columns) for one in load(tmp_path / name)[0]] == [(one.ids, one.columns) for one in lines]
    assert [one.ids for one in lines] == [one.ids for one in table] == [one.ids for one in folder]
    assert [one.columns for one in lines] == [one.columns for one in table] == [one.columns for one in folder]
    assert [one.ids.count(3) for one in table] == [int(i == 3) for i in range(20)]
    assert "tool_calls" not in table[0].columns["prompt"][0] and table[0].columns["extra"] is None


BAD_LINES = [
    ('{"prompt": "a", "prompt": "b"}', "'prompt' comes twice"),
    ('{"prompt": "a", "meta": {"x": 1, "x": 2}}', "'x' comes twice"),
    ('{"prompt": "a b', "line 3"),
    ('["a"]', "must be an object"),
    ("3", "must be an object"),
    ("\x00", "line 3"),
    ('{"prompt": "a"} {"prompt": "b"}', "Extra data"),
    ("[" * 100_000, "line 3"),
]


@pytest.mark.parametrize("line,needle", BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_line_that_is_no_row_is_named(tmp_path: Path, line: str, needle: str) -> None:
    (tmp_path / "p.jsonl").write_text(f"{ROW}\n{line}\n")
    with pytest.raises(ConfigError, match=needle) as error:
        load(tmp_path / "p.jsonl")
    assert "p.jsonl line 3" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text,needle",
    [
        ('[{"prompt": "a"}, {"prompt": "b", "prompt": "c"}]', r"row 1 .*'prompt' comes twice"),
        ('[{"prompt": "a"}, 3]', "row 1 .*must be an object"),
        ('[{"prompt": "a"}, {"prompt": ', "row 1 .*cannot be read"),
        ('[{"prompt": "a"} {"prompt": "b"}]', "behind row 0"),
        ('[{"prompt": "a"}', "behind row 0"),
        ('[{"prompt": "a"}] x', "followed by 'x'"),
        ('{"data": [{"prompt": "a"}]}', "no column 'prompt'"),
        ('{\n"prompt": "a"\n}', "line 1 cannot be read"),
    ],
)
def test_a_json_file_that_is_no_array_of_rows_is_named(tmp_path: Path, text: str, needle: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ConfigError, match=needle) as error:
        load(tmp_path / "p.json")
    assert "p.json" in str(error.value) and "\n" not in str(error.value)


def test_a_gzip_file_that_is_torn_or_none_is_named(tmp_path: Path) -> None:
    for name, content in (("torn", gzip.compress(ROW.encode() * 99)[:-9]), ("none", ROW.encode())):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(content)
        with pytest.raises(ConfigError, match=rf"{name}\.jsonl\.gz cannot be read") as error:
            load(tmp_path / f"{name}.jsonl.gz")
        assert "\n" not in str(error.value)


def test_bytes_that_are_no_text_are_named_with_their_line(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(ROW.encode() * 2 + b'{"prompt": "\xe9"}\n')
    with pytest.raises(ConfigError, match=r"p\.jsonl line 3"):
        load(tmp_path / "p.jsonl")


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_a_column_that_is_not_there(tmp_path: Path, format: str) -> None:
    path = tmp_path / f"p.{format}"
    users.write_rows(path, users.ROWS) if format == "jsonl" else pq.write_table(pa.Table.from_pylist(users.ROWS), path)
    with pytest.raises(ConfigError, match=r"'typo' \(data.prompt_column\), but prompt, answer") as error:
        load(path, prompt_column="typo")
    assert str(path) in str(error.value)


def test_a_row_without_the_prompt_is_named(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"question": "a"}]
    with pytest.raises(ConfigError, match=r"line 2 .*null"):
        load(users.write_rows(tmp_path / "p.jsonl", rows))


def test_a_column_that_comes_twice_is_refused(tmp_path: Path) -> None:
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    pq.write_table(table, tmp_path / "p.parquet")
    with pytest.raises(ConfigError, match="'prompt' comes twice"):
        load(tmp_path / "p.parquet")
