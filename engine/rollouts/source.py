"""What a sampler draws: rollout batches from the stream of prompts, and responses to the held-out ones."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.config import Config
from engine.data.end_of_sequence import stop_token_ids
from engine.data.prompts import Prompt, PromptStream
from engine.generation.base import Generator, Sampling
from engine.rollouts import responses
from engine.sample import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True)
class Batch:
    """A rollout batch, or a rank's share of it."""

    step: int
    """Which one, counted from 0: it is trained on in this step."""
    samples: list[Sample]
    cursor: int
    """Prompts taken from the stream up to its end."""
    seconds: float
    """Spent generating."""
    idle_seconds: float = 0.0
    """Spent by the sampler before, with nothing to do."""
    peak_bytes: int = 0
    """On the fullest GPU of those that only generate; 0 on others."""


class Source:
    """The prompts of a run, for one of ``size`` ranks that share them."""

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[Prompt],
        held_out: Sequence[Prompt],
        *,
        rank: int,
        size: int,
    ) -> None:
        self._config, self._tokenizer, self._held_out = config, tokenizer, held_out
        self._rank, self._size, self._count = rank, size, len(prompts)
        self._stream = PromptStream(list(prompts), config.seed, config.data.shuffle)
        self._stops = stop_token_ids(config, tokenizer)

    def epochs(self, cursor: int) -> float:
        """Passes over the data when so many prompts have been taken."""
        return cursor / self._count

    def batch(self, generator: Generator, step: int, cursor: int) -> Batch:
        """This rank's share of the batch of a step, from the prompts after ``cursor``.

        Every prompt of an epoch comes once before any comes again; a sample's random numbers follow from the seed, the
        step and its place in the whole batch.
        """
        started, rollout_config = time.perf_counter(), self._config.rollout
        self._stream.cursor = cursor
        prompts = self._stream.take(rollout_config.prompts_per_step)
        share = len(prompts) // self._size
        samples = responses.sample(
            prompts[self._rank * share : (self._rank + 1) * share],
            generator,
            self._tokenizer,
            self._sampling(self._config.generation.temperature),
            samples_per_prompt=rollout_config.samples_per_prompt,
            first_group=self._rank * share,
            seed=self._config.seed,
            step=step,
        )
        return Batch(step, samples, self._stream.cursor, time.perf_counter() - started)

    def held_out(self, generator: Generator) -> list[Sample]:
        """This rank's share of the responses to the held-out prompts: the same random numbers every time."""
        settings, count = self._config.eval, len(self._held_out)
        start, end = (count * rank // self._size for rank in (self._rank, self._rank + 1))
        return responses.sample(
            self._held_out[start:end],
            generator,
            self._tokenizer,
            self._sampling(settings.temperature),
            samples_per_prompt=settings.samples_per_prompt,
            first_group=start,
            seed=0,
            step=0,
        )

    def _sampling(self, temperature: float) -> Sampling:
        return Sampling(self._config.rollout.max_response_tokens, temperature, self._stops)
