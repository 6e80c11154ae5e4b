"""Prompts: loading."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import Config, ConfigError, Data
from engine.config.quoted import kind_and_words
from engine.data import sources
from engine.data.encoding import PromptEncoder
from engine.data.end_of_sequence import ends_note, stop_token_ids, vocabulary_size
from engine.data.file_formats import Row
from engine.data.sources import Source
from engine.data.stream import Mixed, Part
from engine.data.templates import PromptError, tools_of
from engine.data.training_rows import split_pair

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt and its row of the data set."""

    ids: list[int]
    text: str
    """What the model sees in words: the ids decoded, special tokens included, without a beginning of sequence."""
    columns: dict[str, Any]
    """The row, its prompt among it as it stands there."""


def load_tokenizer(path: str, key: str = "model.path") -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub name, of the class its own files name.

    ``AutoTokenizer`` picks a class by the model's type where it knows one, and a tokenizer of the wrong class encodes
    every text to nothing; a folder that says its tokenizer is a plain ``tokenizers`` one is believed.

    Args:
        key: the setting that named it, for messages.

    Raises:
        ConfigError: there is none, it cannot be read, or it brings code of its own, which is never run.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    settings = Path(path) / "tokenizer_config.json"
    try:
        declared = json.loads(settings.read_text(encoding="utf-8")).get("tokenizer_class") if settings.is_file() else ""
        plain = declared in ("PreTrainedTokenizerFast", "TokenizersBackend")
        return (PreTrainedTokenizerFast if plain else AutoTokenizer).from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # OSError, ValueError, …, and the tokenizers library raises Exception itself
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"{key}: the tokenizer of '{path}' brings code of its own (auto_map in tokenizer_config.json), and "
                "Tandem runs none: take a model with a tokenizer that transformers has built in"
            ) from error
        raise ConfigError(f"{key} '{path}' has no tokenizer to load: {kind_and_words(error, longest=200)}") from error


def load_prompts(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Prompt], list[Prompt], list[str]]:
    """Training prompts, held-out prompts, and notes for the person.

    The notes say what ends a response, how many prompts were dropped or hold names of control tokens, and how many
    held-out prompts are trained on.

    Raises:
        ConfigError: unreadable file, missing column, a prompt that cannot be used, or none left; names file and row.
    """
    reader, data = _Reader.of(config, tokenizer), config.data
    if data.task is not None:
        train = reader.prompts(_task_rows(data.task, False), "training", data.task)
        return (
            train,
            reader.prompts(_task_rows(data.task, True), "held-out", data.task, config.eval.prompts),
            reader.notes,
        )
    train = reader.training(sources.training(data))
    if not (held_out_sources := sources.held_out(data)):
        return train, [], reader.notes
    held_out = reader.held_out(held_out_sources, config.eval.prompts)
    asked = {tuple(prompt.ids) for prompt in held_out}
    trained = asked.intersection(tuple(prompt.ids) for prompt in train)
    if shared := sum(tuple(prompt.ids) in trained for prompt in held_out):
        reader.notes.append(f"{shared} of {len(held_out)} held-out prompts are training prompts too, token for token")
    return train, held_out, reader.notes


def load_set(
    config: Config, tokenizer: PreTrainedTokenizerBase, held_out: bool, limit: int | None = None
) -> tuple[list[Prompt], list[str]]:
    """The first ``limit`` held-out prompts, or else training prompts, alone, and notes for the person.

    Of rows to train on, too, where what is asked stands in a conversation or in both answers of a pair.

    Raises:
        ConfigError: as ``load_prompts`` does, or there is no such set.
    """
    reader, data = _Reader.of(config, tokenizer), config.data
    reader.asked_in_rows = True
    if data.task is not None:
        kind = "held-out" if held_out else "training"
        return reader.prompts(_task_rows(data.task, held_out), kind, data.task, limit), reader.notes
    if not held_out:
        return reader.training(sources.training(data), limit), reader.notes
    if not (held_out_sources := sources.held_out(data)):
        raise ConfigError(
            "there are no held-out prompts: give them by data.eval_path, data.eval_split or data.eval_fraction"
        )
    return reader.held_out(held_out_sources, limit), reader.notes


def _task_rows(task: str, held_out: bool) -> list[Row]:
    from engine.tasks import addition

    problems = addition.problems("held_out" if held_out else "train")
    return [Row(f"data.task {task}", i, None, row) for i, row in enumerate(problems)]


def _asked(row: Row, data: Data) -> Row:
    """A row with the prompt that training on it takes, where it has none of its own."""
    columns, prompt = row.columns, None
    messages = columns.get(data.messages_column)
    if columns.get(data.prompt_column) is not None:
        return row
    if isinstance(messages, list) and len(messages) > 1:
        prompt = messages[:-1]
    elif {data.chosen_column, data.rejected_column} <= columns.keys():
        try:
            prompt, *_ = split_pair(columns, data)
        except PromptError as error:
            raise ConfigError(f"{row.place}: {error}") from error
    return row if prompt is None else row._replace(columns=columns | {data.prompt_column: prompt})


@dataclass(slots=True)
class _Reader:
    """Turns rows into prompts, and notes what comes of them."""

    config: Config
    encoder: PromptEncoder
    notes: list[str]
    asked_in_rows: bool = False
    """True where a row without a prompt is asked what training on it takes for one."""

    @classmethod
    def of(cls, config: Config, tokenizer: PreTrainedTokenizerBase) -> _Reader:
        """With a first note, on what ends a response."""
        vocabulary = vocabulary_size(config, tokenizer)
        stops = stop_token_ids(config, tokenizer, vocabulary)
        notes = [ends_note(stops, tokenizer, config)]
        return cls(config, PromptEncoder(tokenizer, config.data, stops, vocabulary), notes)

    def training(self, found: Sequence[Source], limit: int | None = None) -> list[Prompt]:
        """The usable prompts of all sources, at most ``limit`` of each; raises ``ConfigError`` if one has none."""
        parts = [
            Part(one.origin.path, one.weight, self.prompts(one.rows(), "training", one.name, limit)) for one in found
        ]
        return Mixed(parts) if self.config.data.mixture else parts[0].items

    def held_out(self, found: Sequence[Source], limit: int | None) -> list[Prompt]:
        """Likewise, at most ``limit`` in all, of several sources in turns."""
        return self.prompts(sources.in_turns(found), "held-out", " + ".join(one.name for one in found), limit)

    def prompts(self, rows: Iterable[Row], kind: str, source: str, limit: int | None = None) -> list[Prompt]:
        """The usable prompts of rows, at most ``limit``; raises ``ConfigError`` if there is none."""
        longest = self.config.rollout.max_prompt_tokens
        prompts: list[Prompt] = []
        too_long = held_control = seen = 0
        for row in rows:
            if limit is not None and len(prompts) == limit:
                break
            seen += 1
            if self.asked_in_rows:
                row = _asked(row, self.config.data)
            prompt, held = self._prompt(row, kind)
            if len(prompt.ids) > longest:
                too_long += 1
                continue
            prompts.append(prompt)
            held_control += held
        if not prompts:
            why = sources.why_empty(self.config.data, kind)
            if seen:
                why = f"all {seen} are longer than rollout.max_prompt_tokens ({longest})"
            raise ConfigError(f"no {kind} prompt is left of {source}: {why}")
        if too_long:
            self.notes.append(
                f"{too_long} {kind} prompts were dropped: longer than rollout.max_prompt_tokens ({longest})"
            )
        if held_control:
            self.notes.append(
                f"{held_control} {kind} prompts hold names of control tokens in their text: they stay text, and do not "
                "become control tokens"
            )
        return prompts

    def _prompt(self, row: Row, kind: str) -> tuple[Prompt, bool]:
        """A row's prompt, and whether its text holds names of control tokens."""
        column = self.config.data.prompt_column
        if column not in row.columns:
            names = ", ".join(row.columns) or "none"
            raise ConfigError(f"{row.place}: {kind} data has no column '{column}' (data.prompt_column), but {names}")
        try:
            encoded = self.encoder.encode(row.columns[column], tools_of(row.columns, self.config.data))
        except PromptError as error:
            raise ConfigError(f"{row.place}, column '{column}': {error}") from error
        if not encoded.ids:
            raise ConfigError(
                f"{row.place}, column '{column}': the prompt {row.columns[column]!r:.80} encodes to no token with this "
                "tokenizer"
            )
        return Prompt(encoded.ids, encoded.text, row.columns), encoded.held_control
