"""Whether sampler and trainer compute the same numbers, and what follows: where *old* comes from. Imports no torch."""

from __future__ import annotations

from typing import Literal

from engine.config import Config

OldSource = Literal["sampler", "pass", "update"]
"""Where the log-probabilities of the policy at the start of the update come from: they are the sampler's; the trainer
computes them in a pass of its own, before the update; or the passes of the update's only optimizer step give them."""


def same_numerics(config: Config) -> bool:
    """True where sampler and trainer compute the same numbers up to fp32 rounding."""
    return config.generation.backend == "hf" and config.model.dtype == "float32"


def old_source(config: Config) -> OldSource:
    """Where *old* comes from.

    With one optimizer step, the same numerics and fresh samples the sampler's values are the trainer's. Where neither
    a policy ratio nor a reward is made of it, *old* is for metrics only, and the sampler's do as well. Elsewhere the
    update's own passes will do if there is one optimizer step and no reward is made of *old* before. Rows of a data set
    have no sampler, and nothing is made of *old*.
    """
    if config.trains_on_rows:
        return "update"
    in_rewards = config.algorithm.kl == "reward" and config.has_reference
    single_step = config.train.epochs_per_batch * config.train.minibatches_per_batch == 1
    fresh = same_numerics(config) and config.schedule.staleness == 0
    if not (config.algorithm.policy_ratio or in_rewards) or (fresh and single_step):
        return "sampler"
    return "pass" if in_rewards or not single_step else "update"
