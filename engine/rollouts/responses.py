"""Prompts to samples: requests with their own seeds, responses, text for display and rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from engine.data.prompts import Prompt
from engine.generation.base import Generator, Request, Sampling
from engine.sample import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def sample_seed(seed: int, step: int, index: int) -> int:
    """The seed of one sample, below 2**63: different for each run seed, step and sample, whatever rank draws it."""
    return int(np.random.SeedSequence([seed, step, index]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def sample(
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
    """Samples K responses to each prompt.

    Args:
        prompts: this rank's part of the rollout batch.
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
    for one, response in zip(samples, generator.generate(requests, sampling), strict=True):
        one.response_ids, one.behaviour_logprobs = response.token_ids, response.logprobs
        one.finish_reason, one.policy_version = response.finish_reason, generator.version
        one.response_text = str(tokenizer.decode(response.token_ids, skip_special_tokens=True))
    return samples
