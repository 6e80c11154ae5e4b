"""Rows of a data set to sequences to train on: which tokens are given, and which the loss is of."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.config import Config, ConfigError, Data
from engine.data import sources
from engine.data.encoding import PLAIN_TOOLS, PromptEncoder, Tools
from engine.data.end_of_sequence import stop_token_ids, vocabulary_size
from engine.data.file_formats import Row
from engine.data.stream import Mixed, Part
from engine.data.templates import PromptError, tools_of
from engine.sample import FinishReason, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Unit = tuple[Sample, ...]
"""What a row becomes: sequences that stay side by side."""


def load_rows(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Unit], list[Unit], list[str]]:
    """Rows to train on, held-out rows, and notes for the person: how many there are, and what became of long ones.

    Raises:
        ConfigError: unreadable file, missing column, a row that cannot be used, or none left; names file and row.
    """
    notes: list[str] = []
    reader = _Reader(config, tokenizer, notes)
    train, held_out = reader.training(), reader.held_out()
    if not held_out:
        return train, [], notes
    kept = {_tokens(unit) for unit in held_out}
    trained = kept.intersection(_tokens(unit) for unit in train)
    if shared := sum(_tokens(unit) in trained for unit in held_out):
        notes.append(f"{shared} of {len(held_out)} held-out rows are training rows too, token for token")
    return train, held_out, notes


def _task_rows(config: Config, split: str) -> list[Row]:
    from engine.tasks import addition

    rows = addition.preferences if config.algorithm.rows == "pair" else addition.worked
    return [Row(f"data.task {config.data.task}", i, None, row) for i, row in enumerate(rows(split))]


def _tokens(unit: Unit) -> tuple[tuple[int, ...], ...]:
    return tuple((*one.prompt_ids, *one.response_ids) for one in unit)


@dataclass(slots=True)
class _Count:
    """What became of the rows of a source."""

    rows: int = 0
    tokens: int = 0
    in_loss: int = 0
    dropped: int = 0
    cut: int = 0

    def line(self, kind: str, longest: int, of_tokens: bool) -> str:
        """A note, with the tokens in the loss where it is of tokens."""
        line = f"{self.rows} {kind} rows of {self.tokens} tokens"
        line += f", {self.in_loss} of them in the loss" * of_tokens
        long = f"longer than data.max_row_tokens ({longest})"
        if self.cut:
            line += f"; {self.cut} were {long} and lost their end"
        if self.dropped:
            line += f"; {self.dropped} more were dropped: {long}" + ", nothing of the loss before it" * bool(self.cut)
        return line


@dataclass(slots=True)
class _Reader:
    """Turns rows into units, and notes what comes of them."""

    config: Config
    tokenizer: PreTrainedTokenizerBase
    notes: list[str]
    stops: tuple[int, ...] = ()
    encoder: PromptEncoder = field(init=False)

    def __post_init__(self) -> None:
        vocabulary = vocabulary_size(self.config, self.tokenizer)
        self.stops = stop_token_ids(self.config, self.tokenizer, vocabulary)
        self.encoder = PromptEncoder(self.tokenizer, self.config.data, self.stops, vocabulary)
        if not self.stops:
            self.notes.append("No token ends a response: the model's files name none, so none is learned")

    def training(self) -> list[Unit]:
        """The usable rows of all sources; raises ``ConfigError`` if one has none."""
        data = self.config.data
        if data.task is not None:
            return self.units(_task_rows(self.config, "train"), "training", data.task)
        found = sources.training(data)
        parts = [Part(one.origin.path, one.weight, self.units(one.rows(), "training", one.name)) for one in found]
        return Mixed(parts) if data.mixture else parts[0].items

    def held_out(self) -> list[Unit]:
        """The held-out ones, none where no setting says what they are; raises ``ConfigError`` likewise."""
        data, limit = self.config.data, self.config.eval.prompts
        if data.task is not None:
            return self.units(_task_rows(self.config, "held_out"), "held-out", data.task, limit)
        if not (found := sources.held_out(data)):
            return []
        return self.units(sources.in_turns(found), "held-out", " + ".join(one.name for one in found), limit)

    def units(self, rows: Iterable[Row], kind: str, source: str, limit: int | None = None) -> list[Unit]:
        """The usable rows, at most ``limit``; raises ``ConfigError`` if there is none."""
        data, count = self.config.data, _Count()
        found: list[Unit] = []
        for row in rows:
            if limit is not None and len(found) == limit:
                break
            try:
                unit = self._unit(row)
                if any(one.response_ids == self._ended([]) for one in unit):
                    raise PromptError("a completion encodes to no token with this tokenizer: there is nothing in it")
            except PromptError as error:
                raise ConfigError(f"{row.place}: {error}") from error
            if max(one.length for one in unit) > data.max_row_tokens:
                unit = tuple(map(self._cut, unit)) if data.too_long == "cut" else ()
                if not unit or min(one.loss_tokens for one in unit) == 0 or _without_difference(unit):
                    count.dropped += 1
                    continue
                count.cut += 1
            found.append(unit)
            count.rows += 1
            count.tokens += sum(one.length for one in unit)
            count.in_loss += sum(one.loss_tokens for one in unit)
        if not found:
            fault = "are longer than" if data.too_long == "drop" else "have nothing of the loss within"
            why = f"all {count.dropped} {fault} data.max_row_tokens" if count.dropped else sources.why_empty(data, kind)
            raise ConfigError(f"no {kind} row is left of {source}: {why}")
        of = f"{source}: " if data.mixture else ""
        self.notes.append(of + count.line(kind, data.max_row_tokens, self.config.trained == "policy"))
        return found

    def _cut(self, one: Sample) -> Sample:
        """A sequence without what is beyond ``data.max_row_tokens``."""
        room = max(0, self.config.data.max_row_tokens - len(one.prompt_ids))
        mask = None if one.loss_mask is None else one.loss_mask[:room]
        reason: FinishReason = "stop" if room >= len(one.response_ids) else "length"
        return dataclasses.replace(one, response_ids=one.response_ids[:room], loss_mask=mask, finish_reason=reason)

    def _unit(self, row: Row) -> Unit:
        """A row's sequence, or the chosen and the rejected one.

        Raises:
            PromptError: no column to read, an empty completion, no difference, or what cannot be encoded.
        """
        data, columns = self.config.data, row.columns
        if self.config.algorithm.rows == "pair":
            return self._pair(columns)
        if columns.get(data.completion_column) is not None:
            if columns.get(data.prompt_column) is None:
                raise PromptError(_lacks(columns, f"'{data.prompt_column}' (data.prompt_column)"))
            prompt, completion = columns[data.prompt_column], columns[data.completion_column]
            return (self._answered(prompt, completion, tools_of(columns, data)),)
        if columns.get(data.messages_column) is None:
            wanted = f"'{data.completion_column}' (data.completion_column) and no '{data.messages_column}'"
            raise PromptError(_lacks(columns, f"{wanted} (data.messages_column)"))
        messages = columns[data.messages_column]
        if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages) or len(messages) < 2:
            raise PromptError(f"a conversation must be a list of at least two messages, not {messages!r:.80}")
        return (self._conversation(messages[:-1], messages[-1:], tools_of(columns, data)),)

    def _pair(self, columns: dict[str, Any]) -> Unit:
        prompt, *answers = split_pair(columns, self.config.data)
        tools = tools_of(columns, self.config.data)
        chosen, rejected = (self._answered(prompt, answer, tools) for answer in answers)
        if _without_difference((chosen, rejected)):
            raise PromptError("chosen and rejected are the same tokens: there is nothing to prefer")
        return dataclasses.replace(chosen, reward=1.0, margin=self._margin(columns)), rejected

    def _margin(self, columns: dict[str, Any]) -> float:
        """By how much the row asks for the chosen answer's score to be above the other's."""
        name = self.config.data.margin_column
        if name is None:
            return 0.0
        margin = columns.get(name)
        if margin is None:
            raise PromptError(_lacks(columns, f"'{name}' (data.margin_column)"))
        if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not math.isfinite(margin):
            raise PromptError(f"the margin in column '{name}' is {margin!r:.80}, and must be a finite number")
        return float(margin)

    def _answered(self, prompt: Any, completion: Any, tools: Tools | None) -> Sample:
        """A prompt and its completion, each a string or messages."""
        if completion in ("", []):
            raise PromptError("the completion is empty: there is nothing in it to learn")
        if isinstance(prompt, str) and isinstance(completion, str) and not self.config.data.chat_template:
            if tools:
                raise PromptError(PLAIN_TOOLS)
            given, ids = self.encoder.followed(prompt, completion)
            if not given.ids:
                raise PromptError(f"the prompt {prompt!r:.80} encodes to no token with this tokenizer")
            return self._sample(given.ids, self._ended(ids), given.text)
        prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        for part, name in ((prompt, "prompt"), (completion, "completion")):
            if not isinstance(part, list) or not part or not all(isinstance(one, dict) for one in part):
                raise PromptError(f"the {name} must be a string or chat messages, not {part!r:.80}")
        return self._conversation(prompt, completion, tools)

    def _conversation(self, prompt: list[dict[str, Any]], answer: list[dict[str, Any]], tools: Tools | None) -> Sample:
        """A conversation with the loss on ``answer``, or on every message of the assistant.

        A last message of ``prompt`` that is the assistant's is gone on with. Of a turn the loss is of what the template
        writes up to the token that ends it.
        """
        if answer[-1].get("role") != "assistant":
            raise PromptError("the last message is not the assistant's: there is no completion to learn")
        if not answer[-1].get("content") and not answer[-1].get("tool_calls"):
            raise PromptError("the last message of the assistant is empty: there is nothing in it to learn")
        messages = [*prompt, *answer]
        if prompt[-1].get("role") == "assistant" and len(answer) == 1 and isinstance(answer[0].get("content"), str):
            messages = [*prompt[:-1], prompt[-1] | {"content": str(prompt[-1].get("content")) + answer[0]["content"]}]
        whole = self.encoder.conversation(messages, tools).ids
        given = self.encoder.encode(prompt, tools)
        if self.config.data.loss_on == "completion":
            spans = [(self._prefix(given.ids, whole), len(whole))]
        else:
            spans = [
                (
                    self._prefix(self.encoder.encode(messages[:place], tools).ids, whole),
                    self._prefix(self.encoder.conversation(messages[: place + 1], tools).ids, whole),
                )
                for place, message in enumerate(messages)
                if place and message.get("role") == "assistant"
            ]
        spans = [(start, self._turn_end(whole, start, end)) for start, end in spans]
        first, last = spans[0][0], spans[-1][1]
        mask = np.zeros(last, bool)
        for start, end in spans:
            mask[start:end] = True
        ended = self._ended(whole[first:last])
        mask = np.concatenate([mask[first:], np.ones(len(ended) - (last - first), bool)])
        return self._sample(whole[:first], ended, given.text, None if mask.all() else mask)

    @staticmethod
    def _prefix(part: Sequence[int], whole: Sequence[int]) -> int:
        """How many tokens the first messages take of the whole conversation."""
        if list(whole[: len(part)]) != list(part):
            raise PromptError(
                "the tokenizer's chat template writes the first messages otherwise when others follow, so that what "
                "the assistant says cannot be told apart: give strings in the model's template and data.templated true"
            )
        return len(part)

    def _turn_end(self, ids: Sequence[int], start: int, end: int) -> int:
        """Behind the last token between two places that ends a response; the later place where there is none."""
        return next((place + 1 for place in range(end - 1, start - 1, -1) if ids[place] in self.stops), end)

    def _ended(self, ids: list[int]) -> list[int]:
        """Response ids that end with a token that ends a response, where there is any."""
        if not self.stops or (ids and ids[-1] in self.stops):
            return ids
        end = self.tokenizer.eos_token_id
        return [*ids, self.stops[0] if end is None else int(end)]

    def _sample(self, prompt: list[int], response: list[int], text: str, mask: np.ndarray | None = None) -> Sample:
        return Sample(
            index=0,
            group_id=0,
            prompt_ids=prompt,
            response_ids=response,
            loss_mask=mask,
            finish_reason="stop",
            reward=0.0,
            prompt_text=text,
        )


def split_pair(columns: dict[str, Any], data: Data) -> tuple[Any, Any, Any]:
    """A pair's prompt, chosen and rejected answer, each a string or messages, without the prompt in the answers.

    Raises:
        PromptError: no column to read, an answer that is empty, or two that are the same.
    """
    for setting in ("chosen_column", "rejected_column"):
        if columns.get(name := getattr(data, setting)) is None:
            raise PromptError(_lacks(columns, f"'{name}' (data.{setting})"))
    prompt, answers = columns.get(data.prompt_column), (columns[data.chosen_column], columns[data.rejected_column])
    if answers[0] == answers[1]:
        raise PromptError("chosen and rejected are the same: there is nothing to prefer")
    behind = ""
    if prompt is None or all(_is_conversation(answer) for answer in answers):
        prompt, answers = _common_prompt(*answers)
        behind = " behind what both begin with, which is taken for the prompt"
    for name, answer in zip(("chosen", "rejected"), answers, strict=True):
        if answer in ("", []):
            raise PromptError(f"{name} is empty{behind}: there is nothing in it to prefer or to avoid")
    return prompt, *answers


def answers(config: Config, tokenizer: PreTrainedTokenizerBase) -> Callable[..., Sample]:
    """What makes of a prompt and an answer to it, each a string or messages, the tokens that training on them has.

    A third argument may be the tools that the answer could call.

    An empty answer is the token that ends a response alone. What is made raises ``PromptError`` for what cannot be
    encoded.
    """
    reader = _Reader(config, tokenizer, [])

    def answered(prompt: Any, answer: Any, tools: Tools | None = None) -> Sample:
        if answer == "":
            given = reader.encoder.encode(prompt, tools)
            return reader._sample(given.ids, reader._ended([]), given.text)
        return reader._answered(prompt, answer, tools)

    return answered


def _is_conversation(answer: Any) -> bool:
    """True for messages that begin with another's than the assistant's: their prompt is among them."""
    first = answer[0] if isinstance(answer, list) and answer else None
    return isinstance(first, dict) and first.get("role") != "assistant"


def _without_difference(unit: Unit) -> bool:
    return len(unit) == 2 and unit[0].response_ids == unit[1].response_ids


def _common_prompt(chosen: Any, rejected: Any) -> tuple[Any, tuple[Any, Any]]:
    """What two answers that hold their prompt begin with, and what each goes on with; of strings a space at the border
    belongs to the answers."""
    if type(chosen) is not type(rejected) or not isinstance(chosen, (str, list)):
        raise PromptError("chosen and rejected must both be strings, or both chat messages")
    pairs = enumerate(zip(chosen, rejected, strict=False))
    length = next((place for place, (one, other) in pairs if one != other), min(len(chosen), len(rejected)))
    if isinstance(chosen, str) and chosen[:length].endswith(" "):
        length -= 1
    if not length:
        raise PromptError("there is no prompt: chosen and rejected begin with nothing in common")
    return chosen[:length], (chosen[length:], rejected[length:])


def _lacks(columns: dict[str, Any], what: str) -> str:
    given = [name for name, value in columns.items() if value is not None]
    return f"the row has no column {what} with something in it, but {', '.join(given) or 'none'}"
