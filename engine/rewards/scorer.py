"""A run's score sources together: weights, clipping, scale, and what comes of truncated responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from algorithms.rollout import Reduce, global_mean
from engine.config import Config
from engine.data.prompts import Prompt
from engine.machine.world import World
from engine.rewards.answers import LARGEST, RewardError, Source
from engine.rewards.function import FunctionReward, load_function
from engine.rewards.server import ServerReward
from engine.sample import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from engine.rewards.classifier import Classifier


@dataclass(frozen=True)
class Sources:
    """A run's score sources before any weights load: those that are ready, and what is known of the reward model."""

    ready: dict[str, FunctionReward | ServerReward]
    model: Classifier | None = None

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Checks that the sources can be asked about these prompts, training and held-out.

        Raises:
            ConfigError: a column has the name of something else that a source is given, a function needs an argument
                that is no column, a server cannot be sent a row, or the reward model's template cannot render a
                prompt.
        """
        columns = {column for prompt in prompts for column in prompt.columns}
        for source in self.ready.values():
            source.check_columns(columns)
            if isinstance(source, ServerReward):
                source.check_rows(prompt.columns for prompt in prompts)
        if self.model is not None:
            self.model.check(prompts)


def read(config: Config, tokenizer: PreTrainedTokenizerBase | None = None) -> Sources:
    """Everything about the run's score sources that needs no weights. Not collective.

    Runs the user's reward file, and reads the reward model's configuration, tokenizer and names of weights.

    Args:
        tokenizer: the policy's, if it is there already.

    Raises:
        ConfigError: a function, model folder, tokenizer or URL cannot be had, or does not fit the run.
    """
    reward, column, seconds = config.reward, config.data.prompt_column, config.scoring_seconds
    ready: dict[str, FunctionReward | ServerReward] = {}
    model = None
    if reward.function is not None:
        function = load_function(reward.function)
        ready["function"] = FunctionReward(function, column, f"reward.function '{reward.function}'", seconds)
    if reward.model is not None:
        from engine.rewards import classifier

        model = classifier.read(config, tokenizer)
    if reward.url is not None:
        ready["url"] = ServerReward(config)
    if not reward.sources:
        from engine.tasks import addition

        ready["score"] = FunctionReward(addition.verify, column, "the task's verifier", seconds)
    return Sources(ready, model)


def load(config: Config, world: World, sources: Sources | None = None) -> Scorer:
    """The run's scorer: of the sources that ``reward`` names, or of the embedded task's verifier. Collective.

    Args:
        sources: what ``read`` gave, if it was called before.

    Raises:
        ConfigError: a source cannot be had, or does not fit the run.
    """
    sources = sources or read(config)
    loaded: dict[str, Source] = dict(sources.ready)
    if sources.model is not None:
        from engine.rewards.model import ModelReward

        loaded["model"] = ModelReward(config, world, sources.model)
    return Scorer(loaded, config)


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
        answers = {name: source(samples) for name, source in self._sources.items()}
        for place, sample in enumerate(samples):
            given = {name: scores[place] for name, scores in answers.items()}
            parts = {name: score for name, score in given.items() if score is not None}
            if len(parts) < len(given):
                sample.reward_parts, sample.reward = parts, None
                continue
            total = sum(self._config.reward.weights.get(name, 1.0) * score for name, score in parts.items())
            reward = self._reward(total, sample)
            if not abs(reward) <= LARGEST:
                raise RewardError(
                    f"the scores {parts} make a reward of {reward}, which is no finite fp32 number: look at "
                    "reward.weights, reward.scale, and at reward.clip, which bounds it"
                )
            sample.reward_parts, sample.reward = parts | {"score": total}, reward

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

    For a reward model also ``reward/model_refused_fraction``: the share of responses that it could not take.

    Args:
        samples: a scored rollout batch of this rank, dropped samples among them.
        reduce: sums a tensor over ranks.
    """
    result = {}
    for name in config.reward.sources:
        scores = [sample.reward_parts[name] for sample in samples if name in sample.reward_parts]
        result[f"reward/{name}_mean"] = global_mean(torch.tensor(scores), reduce)
        if name == "model":
            refused = [float(name not in sample.reward_parts) for sample in samples]
            result["reward/model_refused_fraction"] = global_mean(torch.tensor(refused), reduce)
    return result
