"""All that a sampler is told: how tokens are drawn, where a response ends, and each response's random numbers.

There is nothing else: samplers take no default from a model's ``generation_config.json``, which may truncate the
distribution or penalise repetition. Of that file only the ids that end a response are read, with the tokenizer's and
those of ``generation.stop_tokens`` (``engine.data.end_of_sequence.stop_token_ids``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.config import Config


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; shared by all requests of a call."""

    max_tokens: int
    """Longest response, in tokens, the stop token included."""
    temperature: float
    """0 is greedy; its log-probabilities are those at temperature 1."""
    stop_token_ids: tuple[int, ...]
    """Generation ends with the first of these; it is kept as the response's last token."""
    top_p: float = 1.0
    """Draws from the fewest tokens that have this much probability together; 1 draws from all, as training needs it."""
    top_k: int = 0
    """Draws from so many of the most probable tokens, before ``top_p``; 0 draws from all."""

    @classmethod
    def to_train(cls, config: Config, stop_token_ids: tuple[int, ...]) -> Sampling:
        """Of the responses that are trained on."""
        return cls(config.rollout.max_response_tokens, config.generation.temperature, stop_token_ids)

    @classmethod
    def to_evaluate(cls, config: Config, stop_token_ids: tuple[int, ...]) -> Sampling:
        """Of the responses to held-out prompts."""
        return cls(config.rollout.max_response_tokens, config.eval.temperature, stop_token_ids)


@dataclass(frozen=True, slots=True)
class Request:
    """One response to be sampled."""

    prompt_ids: list[int]
    seed: int
    """0 <= seed < 2**63; the response depends on it and on nothing else that varies between batches or ranks."""


def sample_seed(seed: int, step: int, index: int) -> int:
    """The seed of one sample, below 2**63: different for each run seed, step and sample, whatever rank draws it."""
    return int(np.random.SeedSequence([seed, step, index]).generate_state(1, np.uint64)[0] >> np.uint64(1))
