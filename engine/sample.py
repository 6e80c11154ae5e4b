"""The one record that travels from the sampler to the loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length"]


@dataclass(slots=True)
class Sample:
    """One prompt with one sampled response (an *episode*).

    Token ids travel unchanged from the sampler to the loss: nothing is decoded and encoded again, and lengths are
    carried instead of being read off a token's value, so padding may equal the end-of-sequence token.
    """

    index: int
    """Position in the rollout batch over all ranks; samples of one group are neighbours."""
    group_id: int
    """Which prompt of the rollout batch this is a response to."""
    prompt_ids: list[int]
    columns: dict[str, Any] = field(default_factory=dict)
    """The data set's row, handed to the reward function."""
    response_ids: list[int] = field(default_factory=list)
    """Includes the stop token when ``finish_reason`` is ``stop``; never empty after generation."""
    finish_reason: FinishReason = "length"
    behaviour_logprobs: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    """[len(response_ids)] fp32, nats, of the sampler at the sampling temperature."""
    policy_version: int = -1
    """How many optimizer updates (hand-overs) the sampling policy had seen."""
    reward: float | None = float("nan")
    """None drops the sample: a score source had nothing to say about it."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """What each score source gave, and under ``score`` their weighted sum: neither clipped nor penalised."""
    prompt_text: str = ""
    response_text: str = ""
    """Text is for display and for reward functions; the engine never tokenizes it again."""

    @property
    def length(self) -> int:
        """Tokens of prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)
