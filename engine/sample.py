"""The one record that travels from the sampler, or from a data set's rows, to the loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length"]


@dataclass(slots=True)
class Sample:
    """One prompt with one response (an *episode*), sampled or given.

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
    loss_mask: np.ndarray | None = None
    """[len(response_ids)] bool, the response tokens that the loss is of, such as an assistant's turns in a conversation
    that goes on; None: all of them."""

    margin: float = 0.0
    """Of a pair's chosen response: by how much a reward model has to score it above the other."""
    ref_logprobs: np.ndarray | None = None
    """[loss_tokens] fp32, nats, of the frozen reference, where they are computed once for a row; else None."""

    @property
    def loss_tokens(self) -> int:
        """Response tokens that the loss is of; flat vectors of token quantities hold these alone."""
        return len(self.response_ids) if self.loss_mask is None else int(self.loss_mask.sum())

    @property
    def length(self) -> int:
        """Tokens of prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def record(self) -> dict[str, Any]:
        """What a run's record of samples has of it."""
        return {
            "prompt": self.prompt_text,
            "response": self.response_text,
            "reward": self.reward,
            "finish_reason": self.finish_reason,
            "policy_version": self.policy_version,
            **self.reward_parts,
        }
