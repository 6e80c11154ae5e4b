"""The correction for samples of another policy than the one that is trained: truncated importance weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from algorithms.rollout import global_mean, sequence_sums
from engine.config import Config
from engine.config.numerics import same_numerics
from engine.machine.world import World
from engine.sample import Sample
from kernels.token_losses import LOG_RATIO_LIMIT


def corrects(config: Config) -> bool:
    """True where tokens carry truncated importance weights min(exp(old - behaviour), cap)."""
    if not config.algorithm.policy_ratio:
        return False
    chosen = config.off_policy.correction
    return not same_numerics(config) or config.schedule.staleness > 0 if chosen is None else chosen


def metrics(
    config: Config, samples: Sequence[Sample], old: Tensor, behaviour: Tensor, version: int, world: World
) -> dict[str, float]:
    """How old the samples are, and the importance weights that the loss gives them.

    The weights are those before ``off_policy.cap``: one a token or, where the loss has one ratio a response, one a
    response. A loss that is not corrected has none of them, and neither has a batch of which no rank has a response.

    Args:
        old, behaviour: [T] fp32, nats.
        version: updates the policy has seen.
    """
    if not world.max(len(samples)):
        return {}
    age = torch.tensor([float(version - sample.policy_version) for sample in samples])
    staleness = {"off_policy/staleness": global_mean(age, world.sum)}
    if not corrects(config):
        return staleness
    log_ratio = old - behaviour
    if (ratio_of := config.algorithm.ratio(config.algorithm_settings)) != "token":
        lengths = torch.tensor([len(sample.response_ids) for sample in samples], dtype=torch.int64)
        log_ratio = sequence_sums(log_ratio, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)))
        if ratio_of == "sequence_mean":
            log_ratio = log_ratio / lengths
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return staleness | {
        "off_policy/ratio_mean": global_mean(ratio, world.sum),
        "off_policy/ratio_max": world.max(max(ratio.tolist(), default=0.0)),
        "off_policy/capped_fraction": global_mean((ratio > config.off_policy.cap).float(), world.sum),
    }
