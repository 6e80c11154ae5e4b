"""What a preference loss does besides the vocabulary: one scalar a pair of responses."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from kernels.coefficients import segment_sums

PREFERENCE_LOSSES = ("sigmoid", "ipo", "hinge")


class PreferenceSpec(NamedTuple):
    """The loss's settings, as in :func:`kernels.linear_preference_loss`."""

    loss: str
    beta: float
    label_smoothing: float


class Pairs(NamedTuple):
    """What the loss is told: ``valid`` bool and ``ref_logprobs`` fp32 ``[n]``, ``weights`` fp32 ``[pairs]``, and
    ``lengths`` int64 ``[2·pairs]``, the rows of chosen, rejected, chosen, rejected, …"""

    valid: Tensor
    ref_logprobs: Tensor
    weights: Tensor
    lengths: Tensor

    def span(self, rows: slice, pairs: slice) -> "Pairs":
        """The rows of whole pairs."""
        sequences = slice(2 * pairs.start, 2 * pairs.stop)
        return Pairs(self.valid[rows], self.ref_logprobs[rows], self.weights[pairs], self.lengths[sequences])


class PairCoefficients(NamedTuple):
    """``loss`` (weighted) and both rewards, fp32 ``[pairs]`` each; ``dlogprob`` of every row, ``[n]``."""

    loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor
    dlogprob: Tensor


def pair_coefficients(spec: PreferenceSpec, logprobs: Tensor, pairs: Pairs) -> PairCoefficients:
    """Map whole pairs' log-probabilities to their losses and the losses' derivatives.

    With Δ = Σ(new − ref) over the chosen response − Σ(new − ref) over the rejected one, w the pair's weight, ε the
    label smoothing and loss = w·f(Δ)::

        sigmoid  f = −(1 − ε)·log σ(βΔ) − ε·log σ(−βΔ)     DPO, arXiv 2305.18290, eq. 7; with ε cDPO
        ipo      f = (Δ − 1/(2β))²                          IPO, arXiv 2310.12036, eq. 17, on sums
        hinge    f = max(0, 1 − βΔ)                         SLiC on DPO's rewards, arXiv 2305.10425, 2309.06657

    A token of the chosen response has the derivative w·f′(Δ), of the rejected one −w·f′(Δ); a row that is not valid
    counts in no sum and has none. A pair without weight has neither loss nor derivative, whatever its Δ.
    """
    log_ratio = torch.where(pairs.valid, logprobs - pairs.ref_logprobs, 0.0)
    sums = segment_sums(log_ratio, pairs.lengths)
    chosen, rejected = sums[0::2], sums[1::2]
    margin = chosen - rejected
    logit = spec.beta * margin
    if spec.loss == "sigmoid":
        smoothing = spec.label_smoothing
        loss = -(1 - smoothing) * logsigmoid(logit) - smoothing * logsigmoid(-logit)
        slope = spec.beta * (smoothing * torch.sigmoid(logit) - (1 - smoothing) * torch.sigmoid(-logit))
    elif spec.loss == "ipo":
        distance = margin - 1 / (2 * spec.beta)
        loss, slope = distance.square(), 2 * distance
    else:
        loss, slope = (1 - logit).clamp(min=0), torch.where(logit < 1, -spec.beta, 0.0)
    live = pairs.weights != 0
    slope = torch.where(live, pairs.weights * slope, 0.0)
    by_row = torch.stack((slope, -slope), 1).flatten().repeat_interleave(pairs.lengths, output_size=len(logprobs))
    return PairCoefficients(
        loss=torch.where(live, pairs.weights * loss, 0.0),
        chosen_rewards=spec.beta * chosen,
        rejected_rewards=spec.beta * rejected,
        dlogprob=torch.where(pairs.valid, by_row, 0.0),
    )
