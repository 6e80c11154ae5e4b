"""Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290), online (Guo et al. 2024, arXiv 2402.04792).

Pairs are made from fresh responses, by their scores. No correction for samples of an older policy: the loss compares
two given responses, whoever wrote them (Noukhovitch et al. 2024, arXiv 2410.18252).
"""

from __future__ import annotations

from torch import Tensor

from algorithms.base import Objective, Reduce, Rollout, best_and_worst, global_mean


def objective(rollout: Rollout, *, loss: str, beta: float, label_smoothing: float, reduce: Reduce) -> Objective:
    """Of each group the best response against the worst; a group whose scores are all the same makes no pair.

    ``loss``, ``beta`` and ``label_smoothing`` are those of ``kernels.linear_preference_loss``.
    """
    pairs, tied = pairs_by_score(rollout)
    return Objective(
        units=pairs,
        normalise="pair",
        loss={"loss": loss, "beta": beta, "label_smoothing": label_smoothing},
        metrics={"online_dpo/tied_fraction": global_mean(tied.float(), reduce)},
    )


def pairs_by_score(rollout: Rollout) -> tuple[Tensor, Tensor]:
    """[P, 2] the best and the worst response of each group, and [groups] bool: which groups have none."""
    extremes = best_and_worst(rollout)
    best, worst = rollout.scores[extremes].unbind(1)
    return extremes[best > worst], best == worst
