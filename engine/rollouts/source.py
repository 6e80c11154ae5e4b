"""What a sampler draws: batches from the stream of prompts to train on, and responses to the held-out prompts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.config import Config
from engine.data import stream
from engine.data.end_of_sequence import stop_token_ids
from engine.data.prompts import Prompt
from engine.generation.base import Generator
from engine.generation.sampling import Request, Sampling, sample_seed
from engine.sample import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True)
class Batch:
    """The samples of a step, or a rank's share of them."""

    step: int
    """Which one, counted from 0: it is trained on in this step."""
    samples: list[Sample]
    first: int
    """Prompts taken from the stream before it."""
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
        self._rank, self._size = rank, size
        self._stream = stream.over(prompts, config.seed, config.data.shuffle)
        self._stops = stop_token_ids(config, tokenizer)

    def epochs(self, cursor: int) -> float:
        """Passes over the data when so many prompts have been taken."""
        return self._stream.epochs(cursor)

    def batch(self, generator: Generator, step: int, cursor: int) -> Batch:
        """This rank's share of the batch of a step, from the prompts after ``cursor``.

        Every prompt of an epoch comes once before any comes again; a sample's random numbers follow from the seed, the
        step and its place in the whole batch.
        """
        started, settings = time.perf_counter(), self._config.rollout
        self._stream.cursor = cursor
        prompts = self._stream.take(settings.prompts_per_step)
        share = len(prompts) // self._size
        samples = sample_responses(
            prompts[self._rank * share : (self._rank + 1) * share],
            generator,
            self._tokenizer,
            Sampling.to_train(self._config, self._stops),
            samples_per_prompt=settings.samples_per_prompt,
            first_group=self._rank * share,
            seed=self._config.seed,
            step=step,
        )
        return Batch(step, samples, cursor, self._stream.cursor, time.perf_counter() - started)

    def columns(self, position: int) -> dict[str, Any]:
        """The data set's row of a prompt of the stream, by how many come before it."""
        return self._stream.at(position).columns

    def held_out(self, generator: Generator) -> list[Sample]:
        """This rank's share of the responses to the held-out prompts: the same random numbers every time."""
        settings, count = self._config.eval, len(self._held_out)
        start, end = (count * rank // self._size for rank in (self._rank, self._rank + 1))
        return sample_responses(
            self._held_out[start:end],
            generator,
            self._tokenizer,
            Sampling.to_evaluate(self._config, self._stops),
            samples_per_prompt=settings.samples_per_prompt,
            first_group=start,
            seed=0,
            step=0,
        )


def sample_responses(
    prompts: Sequence[Prompt],
    generator: Generator,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    *,
    samples_per_prompt: int,
    first_group: int,
    seed: int,
    step: int,
) -> list[Sample]:
    """Samples K responses to each prompt, each by a seed of its own, with their text for display and rewards.

    Args:
        prompts: this rank's part of the batch.
        first_group: the place of its first prompt in the whole batch; seeds and ids count from there.
        seed, step: together with a sample's place they fix its random numbers.
    """
    samples = [
        Sample(
            index=(first_group + i) * samples_per_prompt + k,
            group_id=first_group + i,
            prompt_ids=prompt.ids,
            columns=prompt.columns,
            prompt_text=prompt.text,
        )
        for i, prompt in enumerate(prompts)
        for k in range(samples_per_prompt)
    ]
    requests = [Request(sample.prompt_ids, sample_seed(seed, step, sample.index)) for sample in samples]
    for sample, response in zip(samples, generator.generate(requests, sampling), strict=True):
        sample.response_ids, sample.behaviour_logprobs = response.token_ids, response.logprobs
        sample.finish_reason, sample.policy_version = response.finish_reason, generator.version
        sample.response_text = str(tokenizer.decode(response.token_ids, skip_special_tokens=True))
    return samples
