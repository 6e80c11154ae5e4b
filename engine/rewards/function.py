"""Scores by a Python function: the task's verifier or the user's own."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from engine.config import ConfigError, user_code
from engine.machine.deadline import Limit
from engine.rewards.answers import RewardError, Scores, check_columns, checked, prompts_and_columns
from engine.sample import Sample

ARGUMENTS = ("prompts", "completions", "prompt_ids", "completion_ids", "raw_prompts")
"""What a function is given besides the data set's columns."""


def load_function(spec: str) -> Callable[..., Any]:
    """The function that ``module:function`` or ``file.py:function`` names.

    Raises:
        ConfigError: the module, file or function cannot be had; names the file, and the line where it failed.
    """
    module, function = user_code.load("reward.function", spec, inspect.isroutine)
    if inspect.isclass(function):
        raise ConfigError(
            f"reward.function '{spec}' is a class: name a function, or an object of the class that can be called"
        )
    if not callable(function):
        instead = user_code.others(module, spec.rpartition(":")[2], inspect.isroutine)
        raise ConfigError(f"reward.function '{spec}' is not callable but {_a(type(function).__name__)}{instead}")
    return function  # type: ignore[no-any-return]


def _a(noun: str) -> str:
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


class FunctionReward:
    """Calls a function, once for all samples, with keyword lists: texts, token ids, and the data set's columns.

    A function without ``**`` is given those that it names. An ``async`` function runs in an event loop of its own.

    Args:
        name: what it is called in messages.
        seconds: how long a call may take.

    Raises:
        ConfigError: the function takes something by position alone.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        prompt_column: str,
        name: str = "the reward function",
        seconds: float = 3600.0,
    ) -> None:
        self._function, self._prompt_column, self._name, self._seconds = function, prompt_column, name, seconds
        self._named: set[str] | None = None  # None where it takes every name
        self._needed: set[str] = set()
        try:
            # Of what is called, not of what a decorator has wrapped.
            parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
        except (TypeError, ValueError):  # compiled code need not tell
            return
        required = [one for one in parameters if one.default is one.empty]
        if positional := [one.name for one in required if one.kind is one.POSITIONAL_ONLY]:
            raise ConfigError(
                f"{name} takes {', '.join(positional)} by position, but is called with keywords: "
                f"{', '.join(ARGUMENTS)} and the data set's columns"
            )
        by_name = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        self._needed = {one.name for one in by_name if one in required}
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            self._named = {one.name for one in by_name}

    def check_columns(self, columns: Collection[str]) -> None:
        """Checks that the function can be called with the data set's columns.

        Raises:
            ConfigError: it needs something that it is not given, or a column has the name of something else.
        """
        check_columns(columns, self._prompt_column, ARGUMENTS, self._name)
        given = [*ARGUMENTS, *sorted(set(columns) - {self._prompt_column})]
        if missing := sorted(self._needed.difference(given)):
            raise ConfigError(
                f"{self._name} needs the argument{'s' if len(missing) > 1 else ''} {', '.join(missing)}, but is "
                f"called with {', '.join(given)}"
            )

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Raises ``RewardError`` for a faulty answer, or for none in time; what the function itself raises passes
        through."""
        if not samples:
            return []
        # Copies: what the function does to them must not reach the training.
        arguments: dict[str, list[Any]] = {
            "prompts": [sample.prompt_text for sample in samples],
            "completions": [sample.response_text for sample in samples],
            "prompt_ids": [list(sample.prompt_ids) for sample in samples],
            "completion_ids": [list(sample.response_ids) for sample in samples],
        }
        arguments |= prompts_and_columns(samples, self._prompt_column)
        for name in self._needed.difference(arguments):  # a column that none of these rows has
            arguments[name] = [None] * len(samples)
        if self._named is not None:
            arguments = {name: values for name, values in arguments.items() if name in self._named}

        def call() -> Scores:
            try:
                returned = self._function(**arguments)
                if inspect.isawaitable(returned):
                    returned = asyncio.run(_awaited(returned))
                return checked(returned, samples, self._name)
            except (
                SystemExit,
                GeneratorExit,
            ) as error:  # neither is an Exception: the run would end as if it were done
                raise RewardError(f"{self._name} ended itself: {type(error).__name__}({error})") from error

        late = RewardError(
            f"{self._name} has not returned after {self._seconds / 60:g} minutes (reward.batch_timeout_minutes)"
        )
        return Limit(self._seconds, late).call(call)


async def _awaited(returned: Awaitable[Any]) -> Any:
    return await returned
