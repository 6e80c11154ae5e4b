"""A padding token that no response can end with: of a reward model's tokenizer, or of one that gets new tokens.

A sequence classifier of transformers reads the score of a padded row at its last token that is not padding. Where
padding were the token that ends a response, as in many policies' tokenizers, that would be the token before.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

from engine.config import Config
from engine.data.end_of_sequence import stop_token_ids, vocabulary_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPARE = ("pad", "reserved", "unused", "extra")
"""What is in the names of special tokens that are there for padding, or for nothing; the first are taken first."""


def give(config: Config, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Has the tokenizer of ``model.path`` pad on the right, with a token that ends no response.

    Its own stays where it is such a one. Else it gets a special token that it has and that nothing uses, and only where
    there is none a new one, whose id lies behind the others and perhaps behind the model's vocabulary.

    Returns:
        a note for the person where it is another one than before.
    """
    tokenizer.padding_side = "right"
    found = choose(config, tokenizer)
    if found is None:
        return None
    return f"The reward model's padding is {found} ({tokenizer.pad_token_id}): it must end no response"


def choose(config: Config, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Gives it such a padding token, chosen as ``give`` says; what that is, where it is another one than before."""
    vocabulary = vocabulary_size(config, tokenizer)
    used = {*stop_token_ids(config, tokenizer, vocabulary), *_with_a_meaning(tokenizer)}
    if _fits(tokenizer.pad_token_id, used, vocabulary):
        return None
    found = next((token for token in _spare(tokenizer) if _fits(token, used, vocabulary)), None)
    name = _new_name(tokenizer) if found is None else str(tokenizer.convert_ids_to_tokens(found))
    tokenizer.add_special_tokens({"pad_token": name})
    return f"{name}, {'a new token' if found is None else 'a token that nothing uses'}"


def _fits(token: int | None, used: set[int], vocabulary: int) -> bool:
    return token is not None and token < vocabulary and token not in used


def _with_a_meaning(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids that the tokenizer puts into sequences, or its chat template, which may end a turn with one."""
    roles = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id)
    template = str(tokenizer.chat_template or "")
    written = (token for text, token in tokenizer.get_added_vocab().items() if text in template)
    return {token for token in (*roles, *written) if token is not None}


def _spare(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Special tokens that are named as spare, in the order of ``SPARE`` and of their ids."""
    named = (
        (rank, token)
        for token, added in tokenizer.added_tokens_decoder.items()
        for rank, word in enumerate(SPARE)
        if added.special and re.search(word, added.content, re.IGNORECASE)
    )
    return [token for _, token in sorted(named)]


def _new_name(tokenizer: PreTrainedTokenizerBase) -> str:
    taken = tokenizer.get_vocab()
    names = (f"<|pad{number or ''}|>" for number in itertools.count())
    return next(name for name in names if name not in taken)
