"""What every score source is asked with, and what it must answer."""

from __future__ import annotations

import copy
import itertools
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from typing import Any

from engine.config import ConfigError
from engine.sample import Sample

Scores = list[float | None]
"""One finite number a response; None where the source has none, which drops the response."""
Source = Callable[[Sequence[Sample]], Scores]
"""A score source; it may be given no sample at all."""


class RewardError(RuntimeError):
    """A score source failed, or gave something that is not one finite number a response."""


def check_columns(columns: Collection[str], prompt_column: str, taken: Collection[str], source: str) -> None:
    """Checks that no column of the data set has the name of something else that a source is given.

    Args:
        columns: names of the data set's columns.
        prompt_column: the one that sources get under another name.
        taken: names that mean something else.
        source: what is given them, for messages.

    Raises:
        ConfigError: a column has one of these names.
    """
    if clash := sorted((set(columns) - {prompt_column}) & set(taken)):
        raise ConfigError(
            f"the data set's column '{clash[0]}' has the name of something else that {source} is given: rename the "
            "column"
        )


LARGEST = 3.4028234663852886e38
"""The largest fp32 number, in which rewards are computed."""


def prompts_and_columns(samples: Sequence[Sample], prompt_column: str) -> dict[str, list[Any]]:
    """``raw_prompts`` and the data set's other columns, a list over the samples each; None where a row lacks one.

    Lists and dicts are copies: what a source does to them stays its own.
    """
    names = {name for sample in samples for name in sample.columns} - {prompt_column}
    return {
        name: [_own(sample.columns.get(column)) for sample in samples]
        for name, column in [("raw_prompts", prompt_column), *((name, name) for name in sorted(names))]
    }


def _own(value: Any) -> Any:
    return copy.deepcopy(value) if isinstance(value, (list, dict)) else value


def checked(returned: Any, samples: Sequence[Sample], source: str) -> Scores:
    """A source's answer as one finite float or None a sample.

    A list or tuple, an array or tensor with one number a response, or an iterator that gives them. A number is whatever
    Python takes for one, True and False among them, or an array or tensor of one element.

    Args:
        source: what answered, for messages.

    Raises:
        RewardError: another kind of answer, a wrong number of scores, or one that is not finite; shows what came, and
            for a number the prompt.
    """

    def wrong(fault: str, error: Exception | None = None) -> RewardError:
        wrong_answer = RewardError(
            f"{source} must return one number a response, or None to drop it, in a list of {len(samples)} here; {fault}"
        )
        wrong_answer.__cause__ = error
        return wrong_answer

    sized = not isinstance(returned, (str, bytes, bytearray, memoryview, Mapping, Set))
    if not sized or not hasattr(returned, "__iter__") or getattr(returned, "ndim", 1) == 0:
        raise wrong(f"it returned {_kind(returned)}: {_shown(returned)}")
    if isinstance(returned, Iterator):
        returned = list(itertools.islice(returned, len(samples) + 1))  # it may have no end
    try:
        # All at once, where each by itself would be a trip to a GPU.
        items = returned.tolist() if getattr(returned, "ndim", 0) == 1 else list(returned)
    except (TypeError, ValueError, RuntimeError) as error:
        raise wrong(f"it returned {_kind(returned)}: {error}", error) from error
    scores: Scores = []
    for place, item in enumerate(items):
        try:
            scores.append(None if item is None else _number(item))
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise wrong(
                f"it returned {_kind(returned)} whose item {place} is {_kind(item)}: {_shown(item)}", error
            ) from error
    if len(scores) != len(samples):
        raise RewardError(
            f"{source} returned {len(scores)} scores for {len(samples)} responses, where it must return one for each: "
            f"{_shown(returned)}"
        )
    for sample, score in zip(samples, scores, strict=True):
        if score is not None and not abs(score) <= LARGEST:
            raise RewardError(
                f"{source} returned {score} for the prompt {sample.prompt_text!r:.500} "
                f"and the response {sample.response_text!r:.500}: no finite fp32 number"
            )
    return scores


def _number(item: Any) -> float:
    if isinstance(item, (str, bytes, bytearray)):
        raise TypeError("text is no number")
    if getattr(item, "ndim", 0):  # an array or tensor: only of one element
        item = item.item()
    return float(item)


def _kind(value: Any) -> str:
    name = type(value).__name__
    if shape := getattr(value, "shape", None):
        name += f" of shape {list(shape)}"
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _shown(value: Any) -> str:
    """The beginning of what it looks like, in one line, whatever its own class makes of that."""
    brief = reprlib.Repr()
    brief.maxstring = brief.maxother = 120
    return " ".join(brief.repr(value).split())[:200]
