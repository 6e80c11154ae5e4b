"""Prompts: epochs, the cursor, files, tokens."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from engine.config import Config, ConfigError, Data
from engine.data.encoding import PromptEncoder
from engine.data.prompts import Prompt, load_prompts, load_tokenizer
from engine.data.stream import Stream
from engine.generation.base import Response
from engine.generation.sampling import Request, Sampling
from engine.rollouts.source import Source
from engine.tasks import addition


def prompts(count: int) -> list[Prompt]:
    return [Prompt([i + 1], str(i), {}) for i in range(count)]


@pytest.mark.parametrize("take", [1, 3, 7, 10, 25])
def test_every_prompt_once_an_epoch(take: int) -> None:
    stream = Stream(prompts(10), seed=3)
    seen = [prompt.text for _ in range(40 // take + 1) for prompt in stream.take(take)]
    for start in range(0, len(seen) - 9, 10):
        assert Counter(seen[start : start + 10]) == Counter(str(i) for i in range(10))
    assert seen[:10] != seen[10:20], "a new epoch has a new order"


def test_cursor_continues_and_seed_changes_the_order() -> None:
    whole = [p.text for p in Stream(prompts(10), seed=3).take(30)]
    resumed = Stream(prompts(10), seed=3)
    resumed.cursor = 13
    assert [p.text for p in resumed.take(17)] == whole[13:]
    assert [p.text for p in Stream(prompts(10), seed=4).take(30)] != whole
    assert [p.text for p in Stream(prompts(10), seed=3, shuffle=False).take(10)] == [str(i) for i in range(10)]


def config(tmp_path: Path, rows: list[dict], **sections: dict) -> Config:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    sections["data"] = {"path": str(path)} | sections.get("data", {})
    return Config.model_validate(sections)


def test_files(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"prompt": "1+2=", "answer": "3"}, {"prompt": [1, 4, 5], "answer": "4"}]
    loaded, held_out, _ = load_prompts(config(tmp_path, rows), addition.tokenizer())
    assert [p.ids for p in loaded] == [[1, 4, 13, 5, 14], [1, 4, 5]] and held_out == []
    assert loaded[0].columns["answer"] == "3"
    pq.write_table(pa.table({"prompt": ["1+2="], "answer": ["3"]}), tmp_path / "p.parquet")
    again = Config.model_validate(
        {"data": {"path": str(tmp_path / "p.parquet"), "eval_path": str(tmp_path / "p.parquet")}}
    )
    loaded, held_out, _ = load_prompts(again, addition.tokenizer())
    assert loaded[0].ids == held_out[0].ids == [1, 4, 13, 5, 14]


def test_configurations_of_a_hub_data_set(tmp_path: Path) -> None:
    """A folder laid out like one: with several configurations, each with its splits, a name has to be given."""
    header = ["configs:"]
    for name, digit in (("main", 1), ("socratic", 2)):
        header += [f"- config_name: {name}", "  data_files:"]
        for split in ("train", "test"):
            file = f"{name}-{split}.jsonl"
            header += [f"  - {{split: {split}, path: {file}}}"]
            (tmp_path / file).write_text(json.dumps({"prompt": f"{digit}+{len(split)}="}) + "\n")
    (tmp_path / "README.md").write_text("\n".join(["---", *header, "---"]))

    def texts(**keys: str) -> list[list[str]]:
        settings = Config.model_validate({"data": {"path": str(tmp_path)} | keys})
        return [[prompt.text for prompt in part] for part in load_prompts(settings, addition.tokenizer())[:2]]

    assert texts(name="main", eval_split="test") == [["1+5="], ["1+4="]]
    others = {"eval_path": str(tmp_path), "eval_name": "main", "eval_split": "test"}
    assert texts(name="socratic", split="test", **others) == [["2+4="], ["1+4="]]
    with pytest.raises(ConfigError, match="'main', 'socratic'"):
        texts()
    with pytest.raises(ConfigError, match="'main', 'socratic'"):
        texts(name="main", eval_path=str(tmp_path))


def test_a_batch_larger_than_the_data_goes_into_the_next_epochs() -> None:
    """Every prompt as often as the others or once more; a prompt that comes again is a group of its own."""

    class Recording:
        version = 0

        def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
            self.seeds = {request.seed for request in requests}
            return [Response([2], np.zeros(1, np.float32), "stop") for _ in requests]

    sampler = Recording()
    settings = Config.model_validate({"rollout": {"prompts_per_step": 8, "samples_per_prompt": 2}})
    ranks = [Source(settings, addition.tokenizer(), prompts(3), [], rank=rank, size=2) for rank in (0, 1)]
    cursor, seen = 0, []
    for step in range(3):
        drawn, seeds = [], set()
        for source in ranks:
            batch = source.batch(sampler, step, cursor)  # type: ignore[arg-type]
            drawn += batch.samples
            seeds |= sampler.seeds
        assert len({one.group_id for one in drawn}) == 8 and len(seeds) == 16
        groups = [one.prompt_text for one in drawn[::2]]
        assert set(Counter(groups).values()) <= {2, 3} and groups == [one.prompt_text for one in drawn[1::2]]
        cursor, seen = batch.cursor, seen + groups
    assert cursor == 24 and all(set(seen[i : i + 3]) == {"0", "1", "2"} for i in range(0, 24, 3))


def test_long_prompts_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "1+2="}, {"prompt": "11+22="}]
    loaded, _, notes = load_prompts(config(tmp_path, rows, rollout={"max_prompt_tokens": 5}), addition.tokenizer())
    assert len(loaded) == 1 and [note for note in notes if note.startswith("1 training")]


@pytest.mark.parametrize(
    "rows,needle",
    [
        ([{"question": "1+2="}], "no column 'prompt'"),
        ([{"prompt": []}], "encodes to no token"),
        ([{"prompt": 3}], "must be a string"),
        ([{"prompt": [{"role": "user", "content": "1"}]}], "chat template"),
    ],
)
def test_unusable_prompts_are_named(tmp_path: Path, rows: list[dict], needle: str) -> None:
    with pytest.raises(ConfigError, match=needle):
        load_prompts(config(tmp_path, rows), addition.tokenizer())


def test_chat_template_has_one_beginning_of_sequence() -> None:
    tokenizer = addition.tokenizer()
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    for prompt in ("1+2=", [{"role": "user", "content": "1+2="}]):
        ids = PromptEncoder(tokenizer, Data(chat_template=True)).encode(prompt).ids
        assert ids.count(tokenizer.bos_token_id) == 1 and ids[1:] == [4, 13, 5, 14]


def test_addition_splits_do_not_overlap() -> None:
    train, held_out = addition.problems("train"), addition.problems("held_out")
    questions = {row["prompt"] for row in train}
    assert len(train) + len(held_out) == 10_000 and len(held_out) == 4096
    assert not questions & {row["prompt"] for row in held_out}
    for row in held_out[:200]:
        a, b = row["prompt"].rstrip("=").split("+")
        assert int(a) + int(b) == int(row["answer"])


def test_tokenizer_is_of_the_class_its_folder_names(tmp_path: Path) -> None:
    """Beside a Qwen2 configuration AutoTokenizer takes a byte-pair class, which encodes these prompts to nothing."""
    from transformers import Qwen2Config

    addition.tokenizer().save_pretrained(tmp_path)
    Qwen2Config().save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).encode("1+2=") == [1, 4, 13, 5, 14]


def test_lines_end_at_newlines_only(tmp_path: Path) -> None:
    """JSON strings may hold other line separators, and a file a byte order mark."""
    path = tmp_path / "p.jsonl"
    path.write_text(
        "\ufeff" + json.dumps({"prompt": "1+2=", "note": "a\u2028b\u0085c"}, ensure_ascii=False) + "\n", "utf-8"
    )
    loaded, _, _ = load_prompts(Config.model_validate({"data": {"path": str(path)}}), addition.tokenizer())
    assert loaded[0].columns["note"] == "a\u2028b\u0085c"


@pytest.mark.parametrize("content", [b"\xe9\xff", b"{not json", b"[1]"])
def test_unreadable_files_are_configuration_errors(tmp_path: Path, content: bytes) -> None:
    for name in ("p.jsonl", "p.parquet"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=name):
            load_prompts(Config.model_validate({"data": {"path": str(tmp_path / name)}}), addition.tokenizer())
