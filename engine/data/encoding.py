"""A row's prompt to token ids: strings, chat messages through the tokenizer's template, token ids as they are.

A *control token* structures what the model reads: beginning and end of sequence, turns, padding. Only the template, the
tokenizer's own frame (a beginning of sequence, say) and ids that are given as ids make control tokens; their names in a
user's text are text.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from engine.data.templates import FIRST_STAND_IN, PromptError, check_text, checked_message, render, replaced, strings

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerBase

    from engine.config import Data

Tools = list[dict[str, Any]]
"""JSON schemas."""
PLAIN_TOOLS = "the row has tools, and a string prompt without data.chat_template has no place for them"
PROBES: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "x"}],
    [{"role": "system", "content": "x"}, {"role": "user", "content": "x"}],
    [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}],
)
"""Conversations that show with which tokens a template marks turns."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt as the model sees it."""

    ids: list[int]
    text: str
    """The ids in words, special tokens included, without the frame that the tokenizer puts around every text."""
    held_control: bool
    """Whether the user's text held names of control tokens."""


class PromptEncoder:
    """Encodes prompts with one tokenizer.

    Control tokens are the added tokens of the tokenizer that it calls special, those that end a response, and those
    that its chat template writes. A text without their names is encoded by the tokenizer as ever. One with
    such names is encoded by a copy of it that does not know the names (it has private ones in their places).
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, data: Data, ends: Collection[int] = (), vocabulary: int | None = None
    ) -> None:
        """``ends`` are ids that end a response; ``vocabulary`` is how many tokens the model knows."""
        self._tokenizer, self._data, self._vocabulary = tokenizer, data, vocabulary
        self._names = _control_tokens(tokenizer, ends, data.chat_template_kwargs)
        self._unknown = _unknown_token(tokenizer)
        self._ids = frozenset(self._names.values()) - {self._unknown}
        by_length = sorted(self._names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, by_length)) or r"(?!)")
        self._unknown_name = next((name for name, token in self._names.items() if token == self._unknown), None)
        self._front, self._back = _frame(tokenizer)
        added = tokenizer.added_tokens_decoder
        self._normalises = any(added[i].normalized for i in self._ids if i in added)

    def encode(self, prompt: Any, tools: Tools | None = None) -> Encoded:
        """Token ids of a prompt, of messages with the tools that the assistant may call.

        Raises:
            PromptError: no string, messages or ids; text that is no text; a template that cannot be filled.
        """
        if isinstance(prompt, str):
            if self._data.chat_template:
                return self._messages([{"role": "user", "content": prompt}], tools)
            if tools:
                raise PromptError(PLAIN_TOOLS)
            return self._string(prompt)
        if isinstance(prompt, list) and prompt and all(isinstance(one, dict) for one in prompt):
            return self._messages(prompt, tools)
        if isinstance(prompt, list) and all(type(one) is int for one in prompt):  # True is an int, too
            if any(one < 0 for one in prompt):
                raise PromptError(f"the token id {min(prompt)} is negative")
            return self._encoded(list(prompt))
        wanted = "a prompt must be a string, chat messages or token ids"
        if isinstance(prompt, list):
            kinds = ", ".join(sorted({"null" if one is None else type(one).__name__ for one in prompt}))
            raise PromptError(f"{wanted}, not a list of {kinds}: {prompt!r:.80}")
        if prompt is None:
            raise PromptError(f"{wanted}, not null")
        raise PromptError(f"{wanted}, not {type(prompt).__name__}: {prompt!r:.80}")

    def conversation(self, messages: list[dict[str, Any]], tools: Tools | None = None) -> Encoded:
        """Token ids of messages whose last one is finished, what ends its turn included; raises ``PromptError``."""
        return self._messages(messages, tools, finished=True)

    def followed(self, prompt: str, text: str) -> tuple[Encoded, list[int]]:
        """A string prompt as ``encode`` gives it, and the ids of a text that follows it.

        They are those of the two as one text, unless that has a token with the end of the one and the beginning of the
        other in it: a response is sampled to the prompt's own tokens, so the text is then encoded by itself.
        """
        given, whole = self._string(prompt), self._string(prompt + text)
        ids = whole.ids[: len(whole.ids) - len(self._back)]
        if ids[: len(given.ids)] == given.ids:
            return given, ids[len(given.ids) :]
        return given, self._inner(self._string(text).ids)

    def _string(self, text: str) -> Encoded:
        check_text(text, "the prompt")
        ids = list(self._tokenizer(text)["input_ids"])
        if self._data.templated:
            return self._already_templated(text, ids)
        held = self._has_control(self._inner(ids)) or (self._unknown_name is not None and self._unknown_name in text)
        if held:
            ids = list(self._blind.encode(text).ids)
            if self._has_control(self._inner(ids)):
                raise PromptError(self._no_text(text))
        return self._encoded(ids, plain=True, held_control=held)

    def _already_templated(self, text: str, ids: list[int]) -> Encoded:
        """The frame's front (a beginning of sequence) is not put before a text that begins with it."""
        front = len(self._front)
        if front and ids[front : 2 * front] == self._front and ids[:front] == self._front:
            ids = ids[front:]
        return self._encoded(ids, plain=True)

    def _messages(self, messages: list[dict[str, Any]], tools: Tools | None = None, finished: bool = False) -> Encoded:
        template = self._tokenizer.chat_template
        if template is None:
            raise PromptError("chat messages need a tokenizer with a chat template; this one has none")
        if tools and "tools" not in str(template):
            raise PromptError("the row has tools, and the tokenizer's chat template does not know of any")
        messages = [checked_message(message, f"message {place}") for place, message in enumerate(messages)]
        texts = [*strings(messages), *strings(tools)]
        names = sorted({name for text in texts for name in self._pattern.findall(text)})
        if self._normalises and self._found_otherwise(texts):
            raise PromptError(self._no_text(" ".join(texts)))
        if not names:
            text = self._filled(messages, tools, finished)
            return self._encoded(list(self._tokenizer(text, add_special_tokens=False)["input_ids"]))
        ids = self._with_names_as_text(messages, tools, names, texts, finished)
        return self._encoded(ids, held_control=True)

    def _filled(self, messages: list[dict[str, Any]], tools: Tools | None, finished: bool) -> str:
        variables = self._data.chat_template_kwargs | ({"tools": tools} if tools else {})
        return render(messages, self._tokenizer, finished, variables)

    def _with_names_as_text(
        self,
        messages: list[dict[str, Any]],
        tools: Tools | None,
        names: list[str],
        texts: list[str],
        finished: bool,
    ) -> list[int]:
        """Fills the template with stand-ins for ``names``, so that what is a control token's name then is its own."""
        taken = set("".join(texts))
        free = (char for char in map(chr, range(FIRST_STAND_IN, 0x110000)) if char not in taken)
        stand_in = dict(zip(names, free, strict=False))

        def blind(value: Any) -> Any:
            return replaced(value, lambda text: self._pattern.sub(lambda match: stand_in[match[0]], text))

        filled = self._filled(blind(messages), blind(tools), finished)
        expected = list(self._tokenizer(filled, add_special_tokens=False)["input_ids"])
        private = self._pattern.sub(lambda match: self._private[match[0]], filled)
        if list(self._blind.encode(private, add_special_tokens=False).ids) != expected:
            raise PromptError(self._no_text(" ".join(names)))
        for name, char in stand_in.items():
            private = private.replace(char, name)
        ids = list(self._blind.encode(private, add_special_tokens=False).ids)
        if sum(token in self._ids for token in ids) != sum(token in self._ids for token in expected):
            raise PromptError(self._no_text(" ".join(names)))
        return ids

    def _found_otherwise(self, texts: list[str]) -> bool:
        """True if the tokenizer's normalisation makes a control token of a text that does not hold its name."""
        without = (self._pattern.sub(" ", text) for text in texts)
        return any(self._has_control(self._tokenizer(text, add_special_tokens=False)["input_ids"]) for text in without)

    def _has_control(self, ids: list[int]) -> bool:
        return not self._ids.isdisjoint(ids)

    def _inner(self, ids: list[int]) -> list[int]:
        return ids[len(self._front) : len(ids) - len(self._back)]

    def _encoded(self, ids: list[int], plain: bool = False, held_control: bool = False) -> Encoded:
        if self._vocabulary is not None and ids and max(ids) >= self._vocabulary:
            raise PromptError(f"the token id {max(ids)} is beyond the model's {self._vocabulary} tokens")
        first = self._front or [self._tokenizer.bos_token_id]
        start = len(first) if ids[: len(first)] == first else 0
        end = len(ids) - len(self._back) if plain and self._back and ids[-len(self._back) :] == self._back else len(ids)
        text = str(self._tokenizer.decode(ids[start:end], skip_special_tokens=False))
        return Encoded(ids, text, held_control)

    def _no_text(self, text: str) -> str:
        names = sorted(set(self._pattern.findall(text))) or [text]
        return (
            f"the prompt holds the name of a control token, {names[0]!r:.80}, and this tokenizer cannot encode it as "
            "text: remove it (or, if a plain prompt is in the model's template already, set data.templated true)"
        )

    @cached_property
    def _private(self) -> dict[str, str]:
        """Names that nobody can write in place of the control tokens' own."""
        return {name: f"<{uuid.uuid4().hex}>" for name in self._names}

    @cached_property
    def _blind(self) -> tokenizers.Tokenizer:
        """The tokenizer with the control tokens under their private names; ids, frame and all else are the same."""
        import tokenizers

        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise PromptError(self._no_text(" ".join(self._names)))
        tree = json.loads(backend.to_str())
        for added in tree["added_tokens"]:
            added["content"] = self._private.get(added["content"], added["content"])
        model = tree["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {self._private.get(piece, piece): i for piece, i in model["vocab"].items()}
        else:  # a Unigram model's pieces with their scores
            model["vocab"] = [[self._private.get(piece, piece), score] for piece, score in model["vocab"]]
        if "merges" in model:
            pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
            model["merges"] = [pair for pair in pairs if not self._names.keys() & {*pair, "".join(pair)}]
        if model.get("unk_token"):
            model["unk_token"] = self._private.get(model["unk_token"], model["unk_token"])
        blind = tokenizers.Tokenizer.from_str(json.dumps(tree))
        blind.no_truncation()
        blind.no_padding()
        return blind


def _control_tokens(
    tokenizer: PreTrainedTokenizerBase, ends: Collection[int], variables: Mapping[str, Any]
) -> dict[str, int]:
    """Names and ids of the control tokens; ``variables`` are the chat template's."""
    added = {int(i): token for i, token in tokenizer.added_tokens_decoder.items()}
    named = set(tokenizer.all_special_ids)
    control = {i for i, token in added.items() if token.special or i in named or i in ends}
    if tokenizer.chat_template is not None and control != added.keys():
        shown = []
        for messages in PROBES:
            try:
                shown.append(render(messages, tokenizer, variables=variables))
            except PromptError:
                continue
        shown.append(str(tokenizer.chat_template))  # turns of tools and the like, which no short conversation has
        control |= {i for i, token in added.items() if any(token.content in text for text in shown)}
    return {added[i].content: i for i in control if added[i].content}


def _unknown_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id that ordinary text may be given for what the tokenizer does not know."""
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    name = getattr(model, "unk_token", None)
    if name is not None:
        return tokenizer.added_tokens_encoder.get(name, tokenizer.get_vocab().get(name))
    others = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    return None if tokenizer.unk_token_id in others else tokenizer.unk_token_id


def _frame(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The token ids that the tokenizer puts before and after every text."""
    bare, whole = (list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (False, True))
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []
