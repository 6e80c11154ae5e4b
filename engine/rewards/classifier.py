"""What is known of a reward model before its weights load: whether it is one, and whether it fits the run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import Config, ConfigError, Data
from engine.data import policy_tokens, templates
from engine.data.end_of_sequence import stop_token_ids
from engine.data.prompts import Prompt, load_tokenizer
from engine.models import model_folder, weight_files
from engine.sample import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

LANGUAGE_HEADS = ("lm_head.", "embed_out.", "output_projection.")
"""A language model's heads, which a reward model trained from one may still have in its folder."""


@dataclass(frozen=True)
class Classifier:
    """A reward model that can be loaded."""

    path: str
    name: str
    """What it is called in messages."""
    tokenizer: PreTrainedTokenizerBase | None
    """Its own tokenizer; None where that has the policy's vocabulary, so that the policy's tokens serve."""
    policy: PreTrainedTokenizerBase
    """The policy's tokenizer."""
    policy_ends: frozenset[int]
    """Tokens that end a response of the policy."""
    vocabulary: int
    positions: int | None
    """Tokens that it takes at most; None where it has no such limit."""
    data: Data
    """How prompts stand in the data set's rows."""

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Checks that its own template takes the prompts, if they are chat messages: one of each order of roles.

        Raises:
            ConfigError: it has no template, or that fails, with its words.
        """
        if self.tokenizer is None:
            return
        chats = [messages for prompt in prompts if (messages := self._messages(prompt.columns)) is not None]
        for messages in {tuple(str(one.get("role")) for one in chat): chat for chat in chats}.values():
            if self.tokenizer.chat_template is None:
                raise ConfigError(f"{self.name}: prompts are chat messages, and its tokenizer has no chat template")
            try:
                self._templated(messages, "", self.tokenizer)
            except Exception as error:  # whatever a template raises
                raise ConfigError(
                    f"{self.name}: its chat template cannot take the prompt {messages!r:.200}: {_first_line(error)}"
                ) from error

    def ids(self, sample: Sample) -> list[int]:
        """The token ids that it reads for a prompt and its response.

        With the policy's vocabulary these are the very ids of both. Else the texts are rendered and tokenized anew: by
        the chat template of its own tokenizer where the prompt is chat messages; else prompt and response end to end,
        closed by its own end-of-sequence token where the response ended with one of the policy's.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            return sample.prompt_ids + sample.response_ids
        if (messages := self._messages(sample.columns)) is not None:
            text = self._templated(messages, sample.response_text, tokenizer)
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])
        ids = list(tokenizer(sample.prompt_text + sample.response_text)["input_ids"])
        ended = sample.finish_reason == "stop" and sample.response_ids[-1] in self.policy_ends
        if ended and tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
            ids.append(tokenizer.eos_token_id)
        return ids

    def _messages(self, columns: dict[str, Any]) -> list[dict[str, Any]] | None:
        """A row's prompt, where it is chat messages."""
        prompt = columns.get(self.data.prompt_column)
        if isinstance(prompt, str) and self.data.chat_template:
            return [{"role": "user", "content": prompt}]
        return prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict) else None

    def _templated(self, messages: list[dict[str, Any]], response: str, tokenizer: PreTrainedTokenizerBase) -> str:
        whole = templates.answered(messages, response, self.policy, self.data.chat_template_kwargs)
        return str(tokenizer.apply_chat_template(whole, tokenize=False))


def read(config: Config, policy: PreTrainedTokenizerBase | None = None) -> Classifier:
    """Reads and checks ``reward.model``.

    Args:
        policy: the policy's tokenizer, if it is there already.

    Raises:
        ConfigError: it is no decoder with a scoring head of one label alone, is quantised, brings code of its own, or
            does not fit the run's prompts.
    """
    path = config.reward.model
    assert path is not None
    name = f"reward.model '{path}'"
    _check_code(path, name)
    tokenizer = load_tokenizer(path, "reward.model")
    policy = policy or policy_tokens.of_run(config)
    shape = model_folder.read_config("reward.model", path)
    check_head(path, name, shape)
    text = shape.get_text_config()
    positions = model_folder.longest_sequence(shape)
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if policy.get_vocab().items() <= tokenizer.get_vocab().items():  # it may have a padding token more
        if positions is not None and longest > positions:
            raise ConfigError(
                f"{name} takes {positions} tokens at most, fewer than rollout.max_prompt_tokens + "
                f"rollout.max_response_tokens = {longest}"
            )
        tokenizer = None  # type: ignore[assignment]
    elif config.data.chat_template and tokenizer.chat_template is None:
        raise ConfigError(f"{name}: its tokenizer has no chat template, which data.chat_template asks for")
    ends = frozenset(stop_token_ids(config, policy))
    return Classifier(path, name, tokenizer, policy, ends, text.vocab_size, positions, config.data)


def _check_code(path: str, name: str) -> None:
    """Refuses a model whose files bring code, even where transformers has a model of that kind: its head may differ."""
    for file in ("config.json", "tokenizer_config.json"):
        if _declared(path, file).get("auto_map"):
            raise ConfigError(
                f"{name} brings code of its own (auto_map in its {file}), which is never run here: serve it and give "
                "reward.url"
            )


def _declared(path: str, file: str) -> dict[str, Any]:
    """A JSON file of a folder or hub name; empty if there is none, or no readable one: then loading it says so."""
    located: Path | None
    try:
        located = weight_files.locate(path, file)
        content = json.loads(located.read_text(encoding="utf-8")) if located else {}
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def check_head(path: str, name: str, shape: PreTrainedConfig) -> None:
    """Checks that the weights are those of a decoder with one scoring head, a matrix of one row.

    Args:
        name: the setting and the model, for messages.

    Raises:
        ConfigError: they are another model's.
    """
    model = check_kind(name, shape)
    weights = weight_files.shapes(path, name)
    backbone = f"{model.base_model_prefix}."
    heads = {
        tensor: size
        for tensor, size in weights.items()
        if not tensor.startswith((backbone, *LANGUAGE_HEADS)) and any(one.startswith(backbone) for one in weights)
    }
    others = sorted(heads.keys() - {"score.weight"} - model.state_dict().keys())
    if "score.weight" not in weights:
        raise ConfigError(
            f"{name} has no scoring head: it lacks the weights 'score.weight' of a sequence classifier"
            f"{', and has ' + ', '.join(others[:4]) + ' instead' if others else ''}"
        )
    if others:
        raise ConfigError(
            f"{name}: its head is more than a matrix: {type(model).__name__} has no {', '.join(others[:4])}, and "
            "without that its scores would be others; serve it and give reward.url"
        )
    labels = weights["score.weight"][0]
    if labels != 1:
        raise ConfigError(f"{name} is a classifier with {labels} labels; a reward model has one")


def check_kind(name: str, shape: PreTrainedConfig) -> PreTrainedModel:
    """A sequence classifier of a configuration, without weights.

    Raises:
        ConfigError: transformers has none of that kind, or it is no decoder with a head called ``score``.
    """
    import torch
    from transformers import AutoModelForSequenceClassification

    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForSequenceClassification.from_config(shape)
    except Exception as error:  # there is no classifier of that kind, or whatever else a model's class finds wrong
        raise ConfigError(f"{name} is no reward model that can be loaded: {_first_line(error)}") from error
    if not isinstance(getattr(model, "score", None), torch.nn.Linear):
        raise ConfigError(
            f"{name} ({type(model).__name__}) is no decoder with a head called 'score', the only kind of "
            "reward model that can be loaded here: serve it and give reward.url"
        )
    return model


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
