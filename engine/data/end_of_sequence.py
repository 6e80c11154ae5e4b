"""Which token ids end a response: the model's own end-of-sequence ids and the run's stop tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine.config import Config, ConfigError
from engine.config.quoted import words
from engine.models import model_folder, vocabulary, weight_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def vocabulary_size(config: Config, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of the policy's vocabulary, from its configuration; of the embedded task's model, its tokenizer's.

    New tokens (``data.new_special_tokens``) count as well, before the model has rows for them.
    """
    path = config.model.path
    if path is None:
        return len(tokenizer)
    size = int(model_folder.read_config("model.path", path).get_text_config().vocab_size)
    if not config.data.changes_tokenizer:
        return size
    return vocabulary.grown(size, max(tokenizer.get_vocab().values()) + 1)


def stop_token_ids(
    config: Config, tokenizer: PreTrainedTokenizerBase, vocabulary: int | None = None
) -> tuple[int, ...]:
    """Ids that end a response: those that the model's files declare, the tokenizer's and ``generation.stop_tokens``.

    The files are ``generation_config.json`` and ``config.json`` (``text_config`` in it too), whose ``eos_token_id`` may
    be one id or a list of them.

    Args:
        vocabulary: tokens that the model can give; by default read from its configuration.

    Raises:
        ConfigError: no id, an id beyond the vocabulary, or a stop token that is not exactly one token.
    """
    vocabulary = vocabulary_size(config, tokenizer) if vocabulary is None else vocabulary
    declared: list[tuple[str, Any]] = []
    path = config.model.path
    if path is not None:
        for file in ("generation_config.json", "config.json"):
            tree = _model_file(path, file)
            nested = tree.get("text_config")
            for part, prefix in ((tree, ""), (nested if isinstance(nested, dict) else {}, "text_config.")):
                declared.append((f"{prefix}eos_token_id in {file} of model.path '{path}'", part.get("eos_token_id")))
    declared.append((f"the tokenizer of model.path '{path}': its end of sequence", tokenizer.eos_token_id))
    ids: list[int] = []
    for where, value in declared:
        for one in value if isinstance(value, list) else [] if value is None else [value]:
            if type(one) is not int or one < 0:
                raise ConfigError(f"{where} is {value!r}: it must be a token id or a list of them")
            if one >= vocabulary:
                raise ConfigError(
                    f"{where} is {one}, beyond the model's {vocabulary} tokens: it could never end a response"
                )
            ids.append(one)
    ids += [_stop_token(text, tokenizer, vocabulary) for text in config.generation.stop_tokens]
    return tuple(dict.fromkeys(ids))


def _stop_token(text: str, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> int:
    encoded = tokenizer.encode(text, add_special_tokens=False)
    if len(encoded) != 1:
        raise ConfigError(f"generation.stop_tokens: {text!r} is {len(encoded)} tokens, must be one")
    if encoded[0] == tokenizer.unk_token_id and text != tokenizer.unk_token:
        raise ConfigError(f"generation.stop_tokens: {text!r} is no token of this tokenizer")
    if encoded[0] >= vocabulary:
        raise ConfigError(
            f"generation.stop_tokens: {text!r} has the id {encoded[0]}, beyond the model's {vocabulary} tokens: it "
            "could never end a response"
        )
    return int(encoded[0])


def _model_file(path: str, name: str) -> dict[str, Any]:
    """A JSON file of a model folder or of a model on the hub; an empty object where there is none."""
    try:
        file = weight_files.locate(path, name, unreachable_is_absent=True)  # as it is for the weights
        tree = {} if file is None else json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path '{path}': {name} cannot be read: {words(error)}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"model.path '{path}': {name} must be an object, not {tree!r:.80}")
    return tree


def ends_note(stops: Sequence[int], tokenizer: PreTrainedTokenizerBase, config: Config) -> str:
    """What ends a response, in words for the person."""
    length = f"rollout.max_response_tokens ({config.rollout.max_response_tokens})"
    if not stops:
        return f"No token ends a response, only {length}: the model's files and generation.stop_tokens name none"
    names = ", ".join(f"{tokenizer.convert_ids_to_tokens(token)} ({token})" for token in stops)
    return f"Responses end with {names}, or are cut off by {length}"
