"""The padding token of a reward model: which of a tokenizer's tokens can never end a response."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from engine.config import Config
from engine.data import padding
from tests import users

ORDINARY = ["<s>", "</s>", "<unk>", "a", "b"]


def tokenizer(special: list[str], **roles: str) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    vocabulary = {token: i for i, token in enumerate([*ORDINARY, *special])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.add_special_tokens(special)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | roles
    return PreTrainedTokenizerFast(tokenizer_object=core, **names)


CASES: dict[str, tuple[list[str], dict[str, str], str]] = {
    "its own": (["<mine>"], {"pad_token": "<mine>"}, "<mine>"),
    "none, and one is there": (["<|reserved_0|>", "<|padding|>"], {}, "<|padding|>"),
    "end of sequence": (["<image>", "<unused5>", "<|reserved_1|>"], {"pad_token": "</s>"}, "<|reserved_1|>"),
    "another end in the model's files": (["<|endoftext|>", "<|PAD|>"], {"pad_token": "<|endoftext|>"}, "<|PAD|>"),
    "what unknown words become": (["<pad>"], {"pad_token": "<unk>"}, "<pad>"),
    "beginning": (["<image>"], {"pad_token": "<s>"}, "<|pad|>"),
    "written by the template": (
        ["<pad>", "<|reserved_1|>"],
        {"pad_token": "<pad>", "chat_template": "{{ x }}<pad>"},
        "<|reserved_1|>",
    ),
    "none is there": (["<image>"], {}, "<|pad|>"),
}


@pytest.mark.parametrize("special,roles,chosen", CASES.values(), ids=CASES)
def test_a_token_that_ends_no_response(tmp_path: Path, special: list[str], roles: dict[str, Any], chosen: str) -> None:
    one = tokenizer(special, **roles)
    size = len(one)
    ends = [one.get_vocab()[token] for token in ("</s>", "<|endoftext|>") if token in one.get_vocab()]
    policy = users.model_folder(tmp_path, vocab_size=size, eos_token_id=ends)
    before = one.get_vocab()
    note = padding.give(Config.model_validate({"model": {"path": str(policy)}}), one)
    assert one.pad_token == chosen and one.padding_side == "right"
    assert one.pad_token_id == before.get(chosen, size) and before.items() <= one.get_vocab().items()
    assert (note is None) == (roles.get("pad_token") == chosen)
    assert note is None or chosen in note


def test_a_row_of_the_vocabulary_without_a_token_is_used(tmp_path: Path) -> None:
    one = tokenizer([])
    policy = users.model_folder(tmp_path, vocab_size=16)
    padding.give(Config.model_validate({"model": {"path": str(policy)}}), one)
    assert one.pad_token_id == 5
