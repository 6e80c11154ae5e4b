"""The policy's tokenizer, with what a run's settings add to it: a chat template, special tokens, a padding token.

Only a run with ``data.chat_template`` as a file or ``data.new_special_tokens`` adds anything. Of a model that a
run has written, whose tokenizer has all this already, nothing changes.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from engine.config import Config, ConfigError, Data, template_file
from engine.data import padding
from engine.data.prompts import load_tokenizer
from engine.data.templates import FIRST_STAND_IN, PromptError, render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def of_run(config: Config) -> PreTrainedTokenizerBase:
    """The tokenizer of the policy that a run starts from.

    The end of a turn that the template of a file writes becomes its end of sequence. Where it has no padding token, or
    one that ends a response, it gets another.

    Raises:
        ConfigError: there is none, or the settings do not go with it.
    """
    if config.model.path is None:
        from engine.tasks import addition

        return addition.tokenizer()
    tokenizer = load_tokenizer(config.model.path)
    if not config.data.changes_tokenizer:
        return tokenizer
    if _lacking(tokenizer, config.data):
        _check_new_rows(config)
    _add(tokenizer, config.data.new_special_tokens)
    _take_template(tokenizer, config.data)
    padding.choose(config, tokenizer)
    return tokenizer


def of_model(path: str, data: Data, key: str = "model") -> PreTrainedTokenizerBase:
    """The tokenizer of a model that is not trained, with the template of a file if there is one.

    Args:
        key: the setting that named it, for messages.

    Raises:
        ConfigError: there is none, or it lacks tokens of ``data.new_special_tokens``, for which the model has no rows.
    """
    tokenizer = load_tokenizer(path, key)
    if lacking := _lacking(tokenizer, data):
        raise ConfigError(
            f"data.new_special_tokens: '{path}' does not know '{lacking[0]}', and only a run that trains adds tokens"
        )
    _take_template(tokenizer, data)
    return tokenizer


def size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest id."""
    return int(max(tokenizer.get_vocab().values())) + 1


def _lacking(tokenizer: PreTrainedTokenizerBase, data: Data) -> list[str]:
    vocabulary = tokenizer.get_vocab()
    return [name for name in data.new_special_tokens if name not in vocabulary]


def _add(tokenizer: PreTrainedTokenizerBase, names: Collection[str]) -> None:
    from tokenizers import AddedToken

    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in names], special_tokens=True)


def _take_template(tokenizer: PreTrainedTokenizerBase, data: Data) -> None:
    """Gives it the template of the file, and as its end of sequence what that writes behind the assistant's turn."""
    text = template_file.text(data)
    if text is None:
        return
    tokenizer.chat_template = text
    mark, name = chr(FIRST_STAND_IN), f"data.chat_template: '{data.chat_template}'"
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": mark}]
    try:
        behind = render(messages, tokenizer, finished=True, variables=data.chat_template_kwargs).partition(mark)[2]
    except PromptError as error:
        raise ConfigError(f"{name}: {error}") from error
    special = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    names = [special.get(token, "") for token in tokenizer(behind, add_special_tokens=False)["input_ids"]]
    end = next((name for name in names if name and name in behind), None)  # an unknown token's name is not there
    if end is not None:
        tokenizer.eos_token = end
    elif behind.strip():
        raise ConfigError(
            f"{name} ends a turn of the assistant with {behind!r:.80}, in which no special token of this tokenizer is: "
            "name the one that ends it in data.new_special_tokens"
        )


def _check_new_rows(config: Config) -> None:
    """Refuses what cannot learn, or cannot read, tokens that the model does not know yet."""
    model = config.model
    others = (
        ("model.value_path", model.value_path if config.algorithm.value_model else None),
        ("model.reference_path", model.reference_path if config.has_reference else None),
    )
    for key, path in others:
        if path is not None:
            raise ConfigError(
                f"{key}: '{path}' does not know data.new_special_tokens, which model.path gets: leave it out"
            )
    if config.lora.rank:
        raise ConfigError(
            "lora.rank: adapters train neither embedding nor head, so tokens that model.path does not know yet would "
            "stay all alike: train its own weights, or take a model that knows data.new_special_tokens"
        )
