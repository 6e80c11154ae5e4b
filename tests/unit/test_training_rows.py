"""Rows to sequences to train on: which tokens are given, which the loss is of, and what is refused with its row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import engine.run
from engine.config import Config, ConfigError, cli
from engine.data.stream import Stream
from engine.data.training_rows import Unit, load_rows
from engine.rollouts.row_source import RowSource
from engine.sample import Sample
from engine.start import checks
from engine.tasks import addition
from tests import users
from tests.unit.test_prompt_encoding import byte_pairs, unigrams, words

USER, ASSISTANT = {"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}
MORE = [{"role": "user", "content": "d"}, {"role": "assistant", "content": "e f"}]


def load(
    tmp_path: Path, rows: list[dict[str, Any]], tokenizer: Any, algo: str = "sft", **data: Any
) -> tuple[list[Unit], list[str]]:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config.model_validate({"algo": algo, "data": {"path": str(file)} | data})
    units, _, notes = load_rows(config, tokenizer)
    return units, notes


def only(units: list[Unit]) -> Sample:
    ((sample,),) = units
    return sample


def said(tokenizer: Any, sample: Sample) -> tuple[str, str]:
    """What is given, and what the loss is of, in the tokenizer's own tokens."""
    mask = [True] * len(sample.response_ids) if sample.loss_mask is None else sample.loss_mask
    learned = [token for token, counts in zip(sample.response_ids, mask, strict=True) if counts]
    return tuple(" ".join(tokenizer.convert_ids_to_tokens(ids)) for ids in (sample.prompt_ids, learned))  # type: ignore[return-value]


def test_prompt_and_completion(tmp_path: Path) -> None:
    """Tokens are those of the whole text; an end of sequence is learned behind the completion."""
    units, notes = load(tmp_path, [{"prompt": "a b ", "completion": "c d"}], users.tokenizer())
    assert said(users.tokenizer(), only(units)) == ("<s> a b", "c d </s>")
    assert only(units).finish_reason == "stop" and only(units).reward == 0.0
    assert notes == ["1 training rows of 6 tokens, 3 of them in the loss"]


def test_a_token_across_the_border_is_not_made(tmp_path: Path) -> None:
    """The prompt keeps the tokens that a response is sampled to, even where the whole text has others."""
    tokenizer = byte_pairs()
    assert tokenizer("h")["input_ids"] != tokenizer("hello")["input_ids"][:1]
    sample = only(load(tmp_path, [{"prompt": "h", "completion": "ello"}], tokenizer)[0])
    assert sample.prompt_ids == tokenizer("h")["input_ids"]
    assert sample.response_ids == [*tokenizer("ello")["input_ids"], tokenizer.eos_token_id]
    spaced = only(load(tmp_path, [{"prompt": "a", "completion": " b"}], unigrams())[0])
    assert said(unigrams(), spaced) == ("<s> ▁ a", "▁ b </s>"), "no space of its own before the completion"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ASSISTANT]},
        {"prompt": [USER], "completion": [ASSISTANT]},
        {"prompt": [USER], "completion": "c"},
        {"prompt": "a b", "completion": "c", "chat_template": True},
    ],
    ids=["messages", "two lists", "string to messages", "strings in the template"],
)
def test_chat_messages(tmp_path: Path, row: dict[str, Any]) -> None:
    settings = {"chat_template": row.pop("chat_template", False)}
    sample = only(load(tmp_path, [row], words(), **settings)[0])
    assert said(words(), sample) == ("<s> <turn> <unk> a b </s> <turn> a", "c </s>")


def test_every_turn_of_the_assistant(tmp_path: Path) -> None:
    """The user's turns stay in the sequence, without loss; by default the last message is the completion."""
    row = {"messages": [USER, ASSISTANT, *MORE]}
    whole = "<s> <turn> <unk> a b </s> <turn> a c </s> <turn> <unk> d </s> <turn> a e f </s>"
    last = only(load(tmp_path, [row], words())[0])
    assert said(words(), last)[1] == "e f </s>" and last.loss_mask is None
    every = only(load(tmp_path, [row], words(), loss_on="assistant")[0])
    assert said(words(), every) == ("<s> <turn> <unk> a b </s> <turn> a", "c </s> e f </s>")
    assert every.loss_tokens == 5 and every.length == last.length
    for one in (last, every):
        assert " ".join(words().convert_ids_to_tokens([*one.prompt_ids, *one.response_ids])) == whole


def test_what_a_template_writes_after_the_end_is_not_learned(tmp_path: Path) -> None:
    """ChatML has a line break behind each turn, which no response has: it is sampled up to the end of the turn."""
    tokenizer = byte_pairs()
    for loss_on in ("completion", "assistant"):
        row = {"messages": [USER, ASSISTANT, *MORE]}
        sample = only(load(tmp_path, [row], tokenizer, loss_on=loss_on)[0])
        assert sample.response_ids[-1] == tokenizer.eos_token_id
        learned = said(tokenizer, sample)[1]
        assert learned == ("e Ġ f <|im_end|>" if loss_on == "completion" else "c <|im_end|> e Ġ f <|im_end|>")


def test_names_of_control_tokens_stay_text(tmp_path: Path) -> None:
    tokenizer = byte_pairs()
    sample = only(load(tmp_path, [{"prompt": "hi", "completion": "x<|im_end|>y"}], tokenizer)[0])
    assert sample.response_ids.count(tokenizer.eos_token_id) == 1, "the one that ends the response"
    templated = [{"prompt": "hi", "completion": "x<|im_end|>"}]
    sample = only(load(tmp_path, templated, tokenizer, templated=True)[0])
    assert sample.response_ids.count(tokenizer.eos_token_id) == 1 and len(sample.response_ids) == 2


def test_long_rows_are_dropped_or_cut(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b c d e f g"}]
    rows.append({"prompt": "a b c d e f g h", "completion": "a"})
    units, notes = load(tmp_path, rows, users.tokenizer(), max_row_tokens=6)
    assert len(units) == 1
    assert notes[-1].endswith("2 of them in the loss; 2 more were dropped: longer than data.max_row_tokens (6)")
    units, notes = load(tmp_path, rows, users.tokenizer(), max_row_tokens=6, too_long="cut")
    assert [one.length for (one,) in units] == [4, 6] and units[1][0].finish_reason == "length"
    assert "1 were longer than data.max_row_tokens (6) and lost their end; 1 more were dropped" in notes[-1]
    for too_long, why in {"drop": "are longer than", "cut": "have nothing of the loss within"}.items():
        with pytest.raises(ConfigError, match=f"all 1 {why} data.max_row_tokens"):
            load(tmp_path, rows[2:], users.tokenizer(), max_row_tokens=6, too_long=too_long)


REFUSED = {
    "no completion": ({"prompt": "a", "completion": None}, "with something in it, but prompt"),
    "empty completion": ({"prompt": "a", "completion": ""}, "the completion is empty"),
    "no column": ({"prompt": "a", "answer": "b"}, "no column 'completion' (data.completion_column) and no 'messages'"),
    "no prompt": ({"question": "a", "completion": "b"}, "no column 'prompt' (data.prompt_column)"),
    "one message": ({"messages": [USER]}, "a list of at least two messages"),
    "user last": ({"messages": [USER, ASSISTANT, MORE[0]]}, "the last message is not the assistant's"),
    "empty answer": ({"messages": [USER, ASSISTANT | {"content": ""}]}, "the last message of the assistant is empty"),
    "number": ({"prompt": "a", "completion": 7}, "the completion must be a string or chat messages, not 7"),
}


@pytest.mark.parametrize("row,needle", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_used_is_named_with_its_row(tmp_path: Path, row: dict[str, Any], needle: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, [{"prompt": "a", "completion": "b", "messages": None}, row], words())
    assert "rows.jsonl line 2 (row 1 counted from 0)" in str(refused.value) and needle in str(refused.value)


def test_a_template_that_rewrites_earlier_turns_is_refused_where_their_loss_is_asked_for(tmp_path: Path) -> None:
    tokenizer = words()
    tokenizer.chat_template = (
        "{% for m in messages %}<turn> {% if m['role'] == 'user' or loop.last %}{{ m['content'] }} {% endif %}</s> "
        "{% endfor %}{% if add_generation_prompt %}<turn> {% endif %}"
    )
    row = {"messages": [USER, ASSISTANT, *MORE]}
    assert said(tokenizer, only(load(tmp_path, [row], tokenizer)[0]))[1] == "e f </s>"
    with pytest.raises(ConfigError, match="writes the first messages otherwise when others follow"):
        load(tmp_path, [row], tokenizer, loss_on="assistant")


PAIRS = {
    "prompt": {"prompt": "a b", "chosen": "c d", "rejected": "e"},
    "no prompt": {"chosen": "a b c d", "rejected": "a b e"},
    "messages": {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [MORE[1]]},
    "messages, no prompt": {"chosen": [USER, ASSISTANT], "rejected": [USER, MORE[1]]},
    "messages, the prompt in them": {"prompt": "a b", "chosen": [USER, ASSISTANT], "rejected": [USER, MORE[1]]},
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(tmp_path: Path, name: str) -> None:
    """Strings or messages, the prompt explicit or what both begin with; the chosen one is the first."""
    units, notes = load(tmp_path, [PAIRS[name]], words(), "dpo")
    ((chosen, rejected),) = units
    assert chosen.prompt_ids == rejected.prompt_ids and (chosen.reward, rejected.reward) == (1.0, 0.0)
    if "messages" in name:
        given, better, worse = "<s> <turn> <unk> a b </s> <turn> a", "c </s>", "e f </s>"
    else:
        given, better, worse = "<s> a b", "c d </s>", "e </s>"
    assert said(words(), chosen) == (given, better) and said(words(), rejected) == (given, worse)
    assert notes == [f"1 training rows of {chosen.length + rejected.length} tokens, 5 of them in the loss"]


REFUSED_PAIRS = {
    "same": ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same: there is nothing"),
    "same tokens": ({"prompt": "a", "chosen": "b", "rejected": " b"}, "chosen and rejected are the same tokens"),
    "empty": ({"prompt": "a", "chosen": "b", "rejected": ""}, "rejected is empty: "),
    "one begins the other": ({"chosen": "a b", "rejected": "a b c"}, "chosen is empty behind what both begin with"),
    "no prompt": ({"chosen": "a", "rejected": "b"}, "begin with nothing in common"),
    "no rejected": ({"prompt": "a", "chosen": "b"}, "no column 'rejected' (data.rejected_column)"),
    "two kinds": ({"chosen": "a", "rejected": [ASSISTANT]}, "must both be strings, or both chat messages"),
}


@pytest.mark.parametrize("row,needle", REFUSED_PAIRS.values(), ids=REFUSED_PAIRS.keys())
def test_pairs_that_cannot_be_used_are_named_with_their_row(tmp_path: Path, row: dict[str, Any], needle: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, [{"prompt": None} | row], words(), "dpo")
    assert "rows.jsonl line 1 (row 0 counted from 0)" in str(refused.value) and needle in str(refused.value)


def test_pairs_cut_to_the_same_are_dropped(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "chosen": "b c d", "rejected": "b c e"}, {"prompt": "a", "chosen": "b c", "rejected": "c"}]
    units, notes = load(tmp_path, rows, words(), "dpo", max_row_tokens=4, too_long="cut")
    assert len(units) == 1 and "1 were longer" in notes[-1] and "1 more were dropped" in notes[-1]


def test_pairs_may_ask_for_a_margin(tmp_path: Path) -> None:
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "points": 2}
    ((chosen, rejected),), notes = load(tmp_path, [row], words(), "reward_model", margin_column="points")
    assert (chosen.margin, rejected.margin) == (2.0, 0.0) and notes == ["1 training rows of 8 tokens"]
    assert only_margin(load(tmp_path, [row], words(), "reward_model")[0]) == 0.0, "a column that is not named is none"
    for margin, needle in (
        ("2", "the margin in column 'points' is '2', and must be a finite number"),
        (True, "the margin in column 'points' is True"),
        (float("nan"), "the margin in column 'points' is nan"),
        (None, "no column 'points' (data.margin_column)"),
    ):
        with pytest.raises(ConfigError) as refused:
            load(tmp_path, [row | {"points": margin}], words(), "reward_model", margin_column="points")
        assert "rows.jsonl line 1" in str(refused.value) and needle in str(refused.value)


def only_margin(units: list[Unit]) -> float:
    ((chosen, _),) = units
    return chosen.margin


def test_ranks_share_a_batch_of_rows() -> None:
    config = Config.model_validate({"algo": "sft", "train": {"rows_per_step": 4}, "data": {"task": "addition"}})
    units, held_out, _ = load_rows(config, addition.tokenizer())
    ranks = [RowSource(config, addition.tokenizer(), units, held_out, rank=rank, size=2) for rank in (0, 1)]
    batches = [one.batch(3, 12) for one in ranks]
    assert [one.index for batch in batches for one in batch.samples] == [0, 1, 2, 3]
    stream = Stream(units, config.seed)
    stream.cursor = 12
    wanted = [one.prompt_ids for (one,) in stream.take(4)]
    assert [one.prompt_ids for batch in batches for one in batch.samples] == wanted
    assert batches[0].cursor == 16 and batches[0].samples[0].response_text.isdigit()
    assert sum(len(one.held_out()) for one in ranks) == len(held_out) == 512


ROWS = ["--algo", "sft", "--data.task", "addition"]
SETTINGS = {
    "sampled": ([*ROWS, "--kl.coef", "0.1"], "kl.coef is about sampled responses, and sft trains on the rows"),
    "generation": ([*ROWS, "--generation.backend", "vllm"], "generation.backend is about sampled responses"),
    "reward": ([*ROWS, "--reward.function", "x.py:f"], "reward.function"),
    "schedule": ([*ROWS, "--schedule.staleness", "1"], "schedule.staleness is about sampled responses"),
    "rows": (["--algo", "ppo", "--train.epochs", "2"], "train.epochs is about training on the rows of a data set"),
    "ranks": (
        [*ROWS, "--train.rows_per_step", "3", "--launch.ranks", "2"],
        "must be a multiple of the number of ranks",
    ),
    "budget": ([*ROWS, "--train.tokens_per_microbatch", "9"], "must hold the longest sequence: data.max_row_tokens"),
    "two lengths": ([*ROWS, "--train.epochs", "2", "--train.steps", "9"], "give train.steps or train.epochs"),
    "turns of pairs": (
        ["--algo", "dpo", "--data.task", "addition", "--data.loss_on", "assistant"],
        "data.loss_on assistant: dpo compares two completions of one prompt",
    ),
    "margins of a policy": (
        ["--algo", "dpo", "--data.task", "addition", "--data.margin_column", "m"],
        "data.margin_column is a part of a reward model's loss, and dpo has none",
    ),
    "entropy of a reward model": (
        ["--algo", "reward_model", "--data.task", "addition", "--train.entropy_coef", "0.1"],
        "train.entropy_coef is about a policy, and reward_model trains none",
    ),
    "reference": ([*ROWS, "--model.reference_path", "r"], "is the frozen reference policy, and sft has none"),
    "value model": ([*ROWS, "--model.value_path", "v"], "is a value model to start from, and sft has none"),
    "no model": (["--algo", "sft", "--data.path", "rows.jsonl"], "model.path is missing"),
}


@pytest.mark.parametrize("arguments,needle", SETTINGS.values(), ids=SETTINGS.keys())
def test_settings_that_make_no_sense_are_one_line(
    arguments: list[str], needle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("def f(): ...\n")
    assert engine.run.main(arguments) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("error: ") and complaint.count("\n") == 1 and needle in complaint, complaint


def test_epochs_take_the_place_of_steps(tmp_path: Path) -> None:
    """Printed configurations can be read again; on the command line one length replaces a file's other one."""
    config, _ = cli.parse([*ROWS, "--train.epochs", "1.5"])
    file = tmp_path / "printed.yaml"
    file.write_text(cli.dump_yaml(config))
    again, _ = cli.parse(["--config", str(file)])
    assert again == config and again.train.epochs == 1.5
    fixed, _ = cli.parse(["--config", str(file), "--train.steps", "7"])
    assert (fixed.train.steps, fixed.train.epochs) == (7, None)
    checks.check(config, 1, "cpu")
