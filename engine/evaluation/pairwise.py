"""A judge of pairs: a Python function of two responses to a prompt."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from engine.config import ConfigError, user_code
from engine.rewards.answers import check_columns, checked, prompts_and_columns
from engine.sample import Sample

ARGUMENTS = ("prompts", "completions_a", "completions_b", "raw_prompts")
"""What a judge is given besides the data set's columns."""


class PairwiseJudge:
    """Calls a function once for many pairs, with keyword lists.

    Args:
        spec: ``module:function`` or ``file.py:function``.
        prompt_column: the one that the function gets as ``raw_prompts``.

    Raises:
        ConfigError: it cannot be had, or takes something by position alone.
    """

    def __init__(self, spec: str, prompt_column: str) -> None:
        self._name, self._prompt_column = f"judge.pairwise '{spec}'", prompt_column
        _, self._function = user_code.load("judge.pairwise", spec, inspect.isroutine)
        self._named = _names(self._function, self._name)

    def check_columns(self, columns: set[str]) -> None:
        """Raises ConfigError where a column has the name of something else that the function is given."""
        check_columns(columns, self._prompt_column, ARGUMENTS, self._name)

    def __call__(self, ours: Sequence[Sample], theirs: Sequence[Sample]) -> list[float | None]:
        """For each pair how much better ours is: above 0 if it is, below 0 if theirs is, 0 for a tie.

        Raises:
            RewardError: the function gave something else.
        """
        arguments: dict[str, list[Any]] = {
            "prompts": [sample.prompt_text for sample in ours],
            "completions_a": [sample.response_text for sample in ours],
            "completions_b": [sample.response_text for sample in theirs],
        }
        arguments |= prompts_and_columns(ours, self._prompt_column)
        if self._named is not None:
            arguments = {name: values for name, values in arguments.items() if name in self._named}
        return checked(self._function(**arguments), ours, self._name)


def _names(function: Callable[..., Any], name: str) -> set[str] | None:
    """The arguments that a function names, or None for one that takes every name."""
    if not callable(function):
        raise ConfigError(f"{name} is not callable but a {type(function).__name__}")
    parameters = inspect.signature(function).parameters.values()
    if positional := [one.name for one in parameters if one.kind is one.POSITIONAL_ONLY]:
        raise ConfigError(f"{name} takes {', '.join(positional)} by position, but is called with keywords")
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return None
    return {one.name for one in parameters}
