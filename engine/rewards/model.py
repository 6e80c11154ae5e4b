"""Scores by a reward model: a frozen sequence classifier with one label, read at each sequence's last token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.config import Config, ConfigError
from engine.machine.world import World
from engine.rewards.answers import Scores, checked
from engine.rewards.classifier import Classifier
from engine.sample import Sample
from engine.training import models, zero
from engine.training.packing import microbatches


class ModelReward:
    """A reward model, sharded with ZeRO-3 when training is. Building and calling it are collective.

    Raises:
        ConfigError: its weights cannot be loaded, or it scores otherwise here than in transformers.
    """

    def __init__(self, config: Config, world: World, classifier: Classifier) -> None:
        self._config, self._world, self._classifier, self._name = config, world, classifier, classifier.name
        network, new_head = models.load_value(
            classifier.path, dtype=getattr(torch, config.model.dtype), check=models.Check(classifier.name, world.device)
        )
        if new_head:
            raise ConfigError(f"{self._name} has no scoring head")
        self._engine = zero.prepare_deepspeed(network, config)

    @torch.no_grad()
    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """None for a sequence that the model cannot take; ``RewardError`` for a score that is not finite."""
        readings = [self._classifier.ids(sample) for sample in samples]
        taken = [place for place, ids in enumerate(readings) if self._takes(ids)]
        sequences = [
            Sample(index=i, group_id=i, prompt_ids=readings[place], response_ids=[]) for i, place in enumerate(taken)
        ]
        scores = torch.full((len(taken),), torch.nan)
        singles = torch.arange(len(taken))[:, None]
        for batch in microbatches(sequences, singles, self._config.train.tokens_per_microbatch, self._world):
            _, last = self._engine(batch)
            if batch.counts:
                scores[torch.tensor(batch.indices)] = last.cpu()
        given = dict(zip(taken, scores.tolist(), strict=True))
        return checked([given.get(place) for place in range(len(samples))], samples, self._name)

    def _takes(self, ids: list[int]) -> bool:
        """True for a sequence of at least one token, all of its vocabulary, that fits positions and budget."""
        budget, positions = self._config.train.tokens_per_microbatch, self._classifier.positions
        most = budget if positions is None else min(budget, positions)
        return 0 < len(ids) <= most and max(ids) < self._classifier.vocabulary
