"""Scores by a Python function: the task's verifier or the user's own."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from engine.config import ConfigError
from engine.rewards.answers import Scores, checked, columns
from engine.sample import Sample


def load_function(spec: str) -> Callable[..., Any]:
    """The function that ``module:function`` or ``file.py:function`` names.

    Raises:
        ConfigError: the module, file or function cannot be had.
    """
    place, name = spec.split(":")
    try:
        if place.endswith(".py"):
            module_spec = importlib.util.spec_from_file_location("tandem_reward", place)
            assert module_spec is not None and module_spec.loader is not None
            module = importlib.util.module_from_spec(module_spec)
            module_spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        function = getattr(module, name)
    except Exception as error:
        raise ConfigError(f"reward.function '{spec}': {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ConfigError(f"reward.function '{spec}' is not callable")
    return function  # type: ignore[no-any-return]


class FunctionReward:
    """Calls a function, once for all samples, with keyword lists: texts, token ids, and the data set's columns.

    An ``async`` function runs in an event loop of its own.
    """

    def __init__(self, function: Callable[..., Any], prompt_column: str) -> None:
        self._function, self._prompt_column = function, prompt_column

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Raises ``RewardError`` for a faulty answer; what the function itself raises passes through."""
        if not samples:
            return []
        arguments: dict[str, list[Any]] = {
            "prompts": [sample.prompt_text for sample in samples],
            "completions": [sample.response_text for sample in samples],
            "prompt_ids": [sample.prompt_ids for sample in samples],
            "completion_ids": [sample.response_ids for sample in samples],
        }
        returned = self._function(**arguments, **columns(samples, self._prompt_column, arguments))
        if inspect.isawaitable(returned):
            returned = asyncio.run(_awaited(returned))
        return checked(returned, samples, "the reward function")


async def _awaited(returned: Awaitable[Any]) -> Any:
    return await returned
