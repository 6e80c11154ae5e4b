"""Everything a policy loss does besides the vocabulary: one scalar a row.

The head gives each row its log-probability and entropy; the loss gives back dL/dlogprob and dL/dentropy. No backend
knows one loss from another, and no loss knows of chunks, as long as a chunk holds whole sequences where it must.
"""

from typing import NamedTuple

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ±20 before exp, with zero gradient beyond; rows that met the clamp are counted."""

LOSSES = ("clip", "reinforce", "likelihood")
KL_ESTIMATORS = ("k1", "k2", "k3")
KL_ROUNDING = 2.0**-19
"""Two fp32 log-probabilities that differ by less, relative to their magnitude where that is above 1, are the same."""
RATIOS = ("token", "sequence")


class PolicySpec(NamedTuple):
    """The loss's settings, as in :func:`kernels.linear_policy_loss`."""

    loss: str
    clip_low: float
    clip_high: float
    kl_coef: float
    kl_estimator: str
    entropy_coef: float
    is_cap: float | None
    ratio: str
    dual_clip: float | None = None

    @property
    def uses_old(self) -> bool:
        """The loss depends on the old log-probabilities."""
        return self.loss == "clip" or self.is_cap is not None


class Rows(NamedTuple):
    """What the loss is told about each row: fp32 ``[n]`` each, ``valid`` bool, ``lengths`` int64 ``[sequences]``."""

    valid: Tensor
    token_weights: Tensor
    advantages: Tensor | None
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    behaviour_logprobs: Tensor | None
    lengths: Tensor | None

    def span(self, rows: slice, sequences: slice) -> "Rows":
        """The rows of a span, which holds the sequences ``sequences`` whole if rows are tied by sequences."""
        lengths = None if self.lengths is None else self.lengths[sequences]
        per_row = self._replace(lengths=None)
        return Rows._make(None if value is None else value[rows] for value in per_row)._replace(lengths=lengths)


class Coefficients(NamedTuple):
    """``loss`` (weighted), its derivatives by the row's log-probability and entropy, and metrics: ``[n]`` each."""

    loss: Tensor
    dlogprob: Tensor
    dentropy: Tensor
    ratio: Tensor
    clipped: Tensor
    clamped: Tensor


def row_coefficients(spec: PolicySpec, logprobs: Tensor, entropy: Tensor, rows: Rows) -> Coefficients:
    """Map each row's log-probability to its loss and the loss's derivative.

    With r = exp(new − old), A the advantage, w the token weight and ω = min(exp(old − behaviour), is_cap)::

        loss = w · (ω · (policy + kl_coef · KL) − entropy_coef · H)

        clip        policy = −min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A)      PPO, arXiv 1707.06347, eq. 7
                    with dual_clip = d, where A < 0: min(policy, −d·A)              arXiv 1912.09729, eq. 5
        reinforce   policy = −A·new
        likelihood  policy = −new

    ω is a constant. It multiplies the KL term as well, which is an expectation over the same samples, but not the
    entropy, which is exact. KL is one of (http://joschu.net/blog/kl-approx.html), with δ = new − ref::

        k1  δ, with the gradient δ·∇new of the true KL (δ's own has expectation zero; on-policy this is k2's)
        k2  δ²/2
        k3  exp(−δ) − 1 + δ

    A δ within the rounding of the two log-probabilities (``KL_ROUNDING``) counts as 0: a policy that is still its
    reference gets no gradient, which an optimizer that scales gradients to 1 would make a step of.

    With ``ratio="sequence"`` r and ω are those of the whole sequence, exp of the summed differences, and every row
    of a sequence receives the derivative of all its tokens' losses (RLOO, arXiv 2402.14740).

    Args:
        spec: the loss's settings.
        logprobs: ``[n]``, of the policy being trained; a row that is not valid may hold anything.
        entropy: ``[n]``.
        rows: per-row data of the same ``n`` rows; for sequence ratios these are whole sequences.

    Returns:
        Coefficients: rows that are not valid have ratio 1, zeros elsewhere.
    """
    zero = torch.zeros_like(logprobs)
    clamped = torch.zeros_like(rows.valid)

    def exp_ratio(minuend: Tensor, subtrahend: Tensor, whole_sequences: bool) -> tuple[Tensor, Tensor]:
        log_ratio = torch.where(rows.valid, minuend - subtrahend, zero)
        if whole_sequences:
            log_ratio = _sum_over_sequence(log_ratio, rows.lengths)
        return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), log_ratio.abs() > LOG_RATIO_LIMIT

    by_sequence = spec.ratio == "sequence"
    ratio, clipped = torch.ones_like(logprobs), torch.zeros_like(rows.valid)
    weight = torch.where(rows.valid, rows.token_weights, zero)
    counts = weight != 0  # what another row holds, NaN perhaps, must not reach a gradient
    policy_weight = weight
    if rows.old_logprobs is not None:
        ratio, ratio_clamped = exp_ratio(logprobs, rows.old_logprobs, by_sequence)
        clamped = clamped | ratio_clamped
        if rows.behaviour_logprobs is not None and spec.is_cap is not None:
            importance, importance_clamped = exp_ratio(rows.old_logprobs, rows.behaviour_logprobs, by_sequence)
            policy_weight = torch.where(counts, weight * importance.clamp(max=spec.is_cap), zero)
            clamped = clamped | importance_clamped

    if spec.loss == "likelihood":
        policy, dpolicy = -logprobs, -policy_weight
    elif spec.loss == "reinforce":
        assert rows.advantages is not None
        policy = -rows.advantages * logprobs
        dpolicy = torch.where(counts, -policy_weight * rows.advantages, zero)
    else:
        assert rows.advantages is not None
        plain = ratio * rows.advantages
        bounded = ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high) * rows.advantages
        clipped = rows.valid & (bounded < plain)
        policy = -torch.minimum(plain, bounded)
        if spec.dual_clip is not None:
            ceiling = torch.where(rows.advantages < 0, -spec.dual_clip * rows.advantages, float("inf"))
            clipped = clipped | (rows.valid & (policy > ceiling))
            policy = torch.minimum(policy, ceiling)
        dpolicy = torch.where(clipped | ratio_clamped | ~counts, zero, -policy_weight * plain)
        if by_sequence:
            dpolicy = _sum_over_sequence(dpolicy, rows.lengths)

    kl, dkl = zero, zero
    if rows.ref_logprobs is not None and spec.kl_coef > 0:
        delta = logprobs - rows.ref_logprobs
        delta = torch.where(delta.abs() <= KL_ROUNDING * logprobs.abs().clamp(min=1), zero, delta)
        if spec.kl_estimator == "k3":
            inverse_ratio, kl_clamped = exp_ratio(zero, delta, False)
            kl, dkl = inverse_ratio - 1 + delta, 1 - torch.where(kl_clamped, zero, inverse_ratio)
            clamped = clamped | kl_clamped
        else:
            kl, dkl = (delta if spec.kl_estimator == "k1" else delta.square() / 2), delta
        dkl = torch.where(counts, dkl, zero)

    loss = policy_weight * (policy + spec.kl_coef * kl) - weight * spec.entropy_coef * entropy
    return Coefficients(
        loss=torch.where(counts, loss, zero),
        dlogprob=torch.where(rows.valid, dpolicy + policy_weight * spec.kl_coef * dkl, zero),
        dentropy=-weight * spec.entropy_coef,
        ratio=torch.where(rows.valid, ratio, 1.0),
        clipped=clipped,
        clamped=clamped & rows.valid,
    )


def segment_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums of consecutive segments; in order, hence bitwise the same on every repeat."""
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True, initial=0)


def _sum_over_sequence(values: Tensor, lengths: Tensor | None) -> Tensor:
    """Give every row the sum over its sequence."""
    assert lengths is not None
    return segment_sums(values, lengths).repeat_interleave(lengths, output_size=values.numel())
