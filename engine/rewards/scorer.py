"""A run's score sources together: weights, clipping, scale, and what comes of truncated responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from algorithms.base import Reduce, global_mean
from engine.config import Config
from engine.distributed import World
from engine.rewards.answers import Source
from engine.rewards.function import FunctionReward, load_function
from engine.sample import Sample


def load(config: Config, world: World) -> Scorer:
    """The run's scorer: of the sources that ``reward`` names, or of the embedded task's verifier. Collective.

    Raises:
        ConfigError: a function, model or tokenizer cannot be had, or does not fit the run.
    """
    reward, column = config.reward, config.data.prompt_column
    sources: dict[str, Source] = {}
    if reward.function is not None:
        sources["function"] = FunctionReward(load_function(reward.function), column)
    if reward.model is not None:
        from engine.rewards.model import ModelReward

        sources["model"] = ModelReward(config, world)
    if reward.url is not None:
        from engine.rewards.http import HttpReward

        sources["url"] = HttpReward(config)
    if not sources:
        from engine.tasks import addition

        sources["score"] = FunctionReward(addition.verify, column)
    return Scorer(sources, config)


class Scorer:
    """Score sources by name, and what the configuration makes of their scores."""

    def __init__(self, sources: Mapping[str, Source], config: Config) -> None:
        self._sources, self._config = sources, config

    def score(self, samples: Sequence[Sample]) -> None:
        """Sets ``reward`` and ``reward_parts`` of every sample. Collective; a rank may have no sample.

        ``reward_parts`` gets what each source gave, and under ``score`` the weighted sum of it. The sum is clipped to
        ``reward.clip`` and then multiplied by ``reward.scale``; last, a response cut off by its length loses
        ``missing_eos_penalty`` or gets ``missing_eos_reward`` instead. Where a source gave None, the sample is dropped:
        its ``reward`` is None and there is no ``score``.

        Raises:
            RewardError: a source failed, or gave something that is not one finite number a response.
        """
        found = {name: source(samples) for name, source in self._sources.items()}
        for place, sample in enumerate(samples):
            given = {name: scores[place] for name, scores in found.items()}
            parts = {name: score for name, score in given.items() if score is not None}
            if len(parts) < len(given):
                sample.reward_parts, sample.reward = parts, None
                continue
            total = sum(self._config.reward.weights.get(name, 1.0) * score for name, score in parts.items())
            sample.reward_parts, sample.reward = parts | {"score": total}, self._reward(total, sample)

    def _reward(self, score: float, sample: Sample) -> float:
        reward, rollout = self._config.reward, self._config.rollout
        if reward.clip is not None:
            score = max(-reward.clip, min(reward.clip, score))
        score *= reward.scale
        if sample.finish_reason == "length":
            if rollout.missing_eos_penalty is not None:
                score -= rollout.missing_eos_penalty
            elif rollout.missing_eos_reward is not None:
                score = rollout.missing_eos_reward
        return score


def means(samples: Sequence[Sample], config: Config, reduce: Reduce) -> dict[str, float]:
    """``reward/NAME_mean`` of each source: the mean of what it gave, over all ranks.

    Args:
        samples: a scored rollout batch of this rank, dropped samples among them.
        reduce: sums a tensor over ranks.
    """
    result = {}
    for name in config.reward.sources:
        scores = [sample.reward_parts[name] for sample in samples if name in sample.reward_parts]
        result[f"reward/{name}_mean"] = global_mean(torch.tensor(scores), reduce)
    return result
