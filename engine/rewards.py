"""Scores of responses by a Python function: the task's verifier or the user's own."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Sequence

from engine.config import Config, ConfigError
from engine.sample import Sample

RewardFunction = Callable[..., Sequence[float]]


class RewardError(RuntimeError):
    """A reward function returned something that is not one finite number a response."""


def load(config: Config) -> RewardFunction:
    """The reward function of a run: ``reward.function``, or the embedded task's verifier.

    Raises:
        ConfigError: the module, file or function cannot be had.
    """
    if config.reward.function is None:
        from engine.tasks import addition

        return addition.verify
    place, name = config.reward.function.split(":")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location("tandem_reward", place)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        function = getattr(module, name)
    except Exception as error:
        raise ConfigError(f"reward.function '{config.reward.function}': {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ConfigError(f"reward.function '{config.reward.function}' is not callable")
    return function


def score(samples: Sequence[Sample], function: RewardFunction, config: Config) -> None:
    """Sets ``reward`` and ``reward_parts`` of every sample.

    The function's value is clipped to ``reward.clip``; a response cut off by its length then loses
    ``missing_eos_penalty`` or gets ``missing_eos_reward`` instead.

    Raises:
        RewardError: wrong number of scores, or one that is not finite; names the prompt.
    """
    if not samples:
        return
    names = {name for sample in samples for name in sample.columns} - {config.data.prompt_column}
    columns = {name: [sample.columns.get(name) for sample in samples] for name in names}
    arguments = {
        "prompts": [sample.prompt_text for sample in samples],
        "completions": [sample.response_text for sample in samples],
        "completion_ids": [sample.response_ids for sample in samples],
    }
    if taken := sorted(columns.keys() & arguments.keys()):
        raise RewardError(f"the data set's column '{taken[0]}' has the name of the reward function's own argument")
    returned = function(**arguments, **columns)
    try:
        scores = [float(score) for score in returned]
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"the reward function must return one number a response, {len(samples)} here; it returned "
            f"{returned!r:.200} ({error})"
        ) from error
    if len(scores) != len(samples):
        raise RewardError(f"the reward function returned {len(scores)} scores for {len(samples)} responses")
    rollout, clip = config.rollout, config.reward.clip
    for sample, value in zip(samples, scores, strict=True):
        if not math.isfinite(value):
            raise RewardError(
                f"the reward function returned {value} for the prompt {sample.prompt_text!r} "
                f"and the response {sample.response_text!r}"
            )
        sample.reward_parts = {"score": value}
        if clip is not None:
            value = max(-clip, min(clip, value))
        if sample.finish_reason == "length":
            if rollout.missing_eos_penalty is not None:
                value -= rollout.missing_eos_penalty
            elif rollout.missing_eos_reward is not None:
                value = rollout.missing_eos_reward
        sample.reward = value
