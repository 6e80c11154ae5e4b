"""Chat messages: what of them can be used, and the text that a tokenizer's chat template makes of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from engine.config import Data
from engine.config.quoted import words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIRST_STAND_IN = 0xF0000
"""Characters from here on are for private use; they stand for something else while a template is filled."""


class PromptError(ValueError):
    """A prompt cannot be used; the message says why, and leaves the row to its reader."""


def checked_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    """A chat message as templates take it: its content is a string, or nothing beside ``tool_calls``.

    Raises:
        PromptError: no role, no content, content that is not text, or characters that are none.
    """
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise PromptError(f"{where} has no role (its keys are {', '.join(map(str, message)) or 'none'})")
    where = f"{where} ({role})"
    if content is None:
        if not message.get("tool_calls"):
            raise PromptError(f"{where} has no content: it is null or missing, which only goes with tool_calls")
    elif isinstance(content, list):
        content = _joined(content, where)
    elif not isinstance(content, str):
        raise PromptError(f"the content of {where} must be a string or a list of text parts, not {content!r:.80}")
    for text in strings([message]):
        check_text(text, where)
    return message | {"content": content}


def _joined(parts: list[Any], where: str) -> str:
    if not parts:
        raise PromptError(f"the content of {where} is an empty list")
    for place, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise PromptError(
                f'content[{place}] of {where} is no text part ({{"type": "text", "text": ...}}) but {kind!r}: only '
                "text can be trained on"
            )
    return "".join(part["text"] for part in parts)


def tools_of(columns: dict[str, Any], data: Data) -> list[dict[str, Any]] | None:
    """The tools of a row (``data.tools_column``), JSON schemas as its template takes them; None if it has none.

    Raises:
        PromptError: the column is not there, or holds something else.
    """
    if data.tools_column is None:
        return None
    if data.tools_column not in columns and not data.mixture:  # of which one source may have tools and another not
        raise PromptError(f"there is no column '{data.tools_column}' (data.tools_column), but {', '.join(columns)}")
    tools = columns.get(data.tools_column)
    where = f"the tools in the column '{data.tools_column}'"
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise PromptError(f"{where} are no JSON: {words(error)}") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise PromptError(f"{where} must be a list of JSON objects, or one as text, not {tools!r:.80}")
    for text in strings(tools):
        check_text(text, where)
    return tools


def render(
    messages: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    finished: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Messages by the tokenizer's chat template, up to where the response begins.

    That is a new turn of the assistant, or where the last message is the assistant's the end of what it says. A message
    of tool calls alone has null content, as templates know it, unless its template would write that null as a word.

    Args:
        finished: write all the messages as they are instead, with what ends the last one's turn.
        variables: more for the template, ``tools`` among them.

    Raises:
        PromptError: the template cannot be filled, with its own words.
    """
    last = messages[-1]
    if last["role"] == "assistant" and last.get("tool_calls") and not finished:
        raise PromptError("the last message is a tool call of the assistant, and there is nothing in it to go on with")
    mute = [message for message in messages if message["content"] is None]
    if not mute:
        return _filled(messages, tokenizer, finished, variables)
    empty = [message | {"content": message["content"] or ""} for message in messages]
    try:
        null = _filled(messages, tokenizer, finished, variables)
    except PromptError:
        return _filled(empty, tokenizer, finished, variables)
    try:
        text = _filled(empty, tokenizer, finished, variables)
    except PromptError:
        return null
    return text if null.count("None") > text.count("None") else null


def answered(
    messages: list[dict[str, Any]],
    response: str,
    tokenizer: PreTrainedTokenizerBase,
    variables: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """The conversation with a sampled response in it, for another tokenizer's template.

    The response is the assistant's message, after what the policy's template put there before it (a prefilled
    ``<think>``, say), or goes on with a last message that is the assistant's.

    Args:
        messages: a row's prompt as it stands there.
        tokenizer: the policy's.
        variables: more for its template.
    """
    messages = [checked_message(message, f"message {place}") for place, message in enumerate(messages)]
    if messages[-1]["role"] == "assistant":
        return [*messages[:-1], messages[-1] | {"content": messages[-1]["content"] + response}]
    return [*messages, {"role": "assistant", "content": _prefill(messages, tokenizer, variables) + response}]


def _prefill(
    messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any] | None
) -> str:
    """What the template writes at the beginning of a new assistant's message, beyond the header of every one."""
    mark = chr(FIRST_STAND_IN)
    opened = render(messages, tokenizer, variables=variables)
    try:
        whole = [*messages, {"role": "assistant", "content": mark}]
        closed = str(tokenizer.apply_chat_template(whole, tokenize=False, **(variables or {})))
    except Exception:  # a template for prompts alone
        return ""
    header, separator, _ = closed.partition(mark)
    common = next(
        (i for i, (a, b) in enumerate(zip(opened, header, strict=False)) if a != b), min(len(opened), len(header))
    )
    rest = opened[common:] if separator else ""
    return "" if rest.isspace() else rest


def _filled(
    messages: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    finished: bool,
    variables: Mapping[str, Any] | None,
) -> str:
    goes_on = messages[-1]["role"] == "assistant" and not finished
    try:
        return str(
            tokenizer.apply_chat_template(
                copy.deepcopy(messages),
                tokenize=False,
                add_generation_prompt=not goes_on and not finished,
                continue_final_message=goes_on,
                **copy.deepcopy(dict(variables or {})),
            )
        )
    except Exception as error:  # whatever a template raises
        said = words(error) or type(error).__name__
        raise PromptError(f"the tokenizer's chat template cannot take the messages: {said:.300}") from error


def strings(value: Any) -> Iterator[str]:
    """All strings in a value, keys of objects among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from strings(key)
            yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)


def replaced(value: Any, change: Any) -> Any:
    """A value with all its strings changed, as ``strings`` yields them."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): replaced(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [replaced(inner, change) for inner in value]
    return value


def check_text(text: str, where: str) -> None:
    """Raises ``PromptError`` for a string that UTF-8 cannot hold, as JSON's escapes can make."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = f"\\u{ord(text[error.start]):04x}"
        raise PromptError(
            f"{where} holds half of a surrogate pair, {code} at character {error.start}, which is no text: repair it"
        ) from None
