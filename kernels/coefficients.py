"""Everything a policy loss does besides the vocabulary: one scalar a row.

The head gives each row its log-probability and entropy; the loss gives back dL/dlogprob and dL/dentropy. No backend
knows one loss from another, and no loss knows of chunks, as long as a chunk holds whole sequences where it must. The
formulas are in kernels/token_losses.py.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.token_losses import KL_ESTIMATORS, LOSSES, Numbers, TokenLoss, row_terms, unchanged

RATIOS = ("token", "sequence", "sequence_mean")


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
    def record(self) -> TokenLoss:
        """What the loss is and needs."""
        return LOSSES[self.loss]

    @property
    def uses_old(self) -> bool:
        """The loss depends on the old log-probabilities."""
        return self.record.old or self.is_cap is not None

    @property
    def ties_rows(self) -> bool:
        """A ratio is that of a whole sequence."""
        return self.ratio != "token"

    @property
    def numbers(self) -> Numbers:
        """As the formulas take them."""
        return Numbers(self.clip_low, self.clip_high, self.dual_clip, self.kl_coef, self.entropy_coef, self.is_cap)


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

    def that_count(self, spec: PolicySpec) -> "Rows":
        """Without the columns that the loss has no use for: it goes by what is there."""
        has_importance = self.old_logprobs is not None and spec.is_cap is not None
        return self._replace(
            ref_logprobs=self.ref_logprobs if spec.kl_coef > 0 else None,
            behaviour_logprobs=self.behaviour_logprobs if has_importance else None,
        )


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

    With w the token weight and ω = min(exp(old − behaviour), is_cap)::

        loss = w · (ω · (policy + kl_coef · KL) − entropy_coef · H)

    policy is a loss of kernels/token_losses.py, a function of new, r = exp(new − old) and the advantage; KL is an
    estimator from there, of δ = new − ref. ω is a constant. It multiplies the KL term as well, which is an expectation
    over the same samples, but not the entropy, which is exact. A δ within the rounding of the two log-probabilities
    (``KL_ROUNDING``) counts as 0: a policy that is still its reference gets no gradient, which an optimizer that scales
    gradients to 1 would make a step of.

    ``ratio`` says whose ratio r is, and ω with it, both being ratios of two policies for the same tokens::

        token          the token's own
        sequence       exp of the sequence's summed differences           RLOO, arXiv 2402.14740
        sequence_mean  exp of their mean over the sequence's valid rows    GSPO, arXiv 2507.18071, eq. 7

    A sequence's log-ratio moves with the log-probability of each of its tokens, so that every row of the sequence
    receives the derivative of all its tokens' losses, or the mean of these.

    Args:
        spec: the loss's settings.
        logprobs: ``[n]``, of the policy being trained; a row that is not valid may hold anything.
        entropy: ``[n]``.
        rows: per-row data of the same ``n`` rows; for sequence ratios these are whole sequences.

    Returns:
        Coefficients: rows that are not valid have ratio 1, zeros elsewhere.
    """
    rows, zero = rows.that_count(spec), torch.zeros_like(logprobs)

    def read(values: Tensor) -> Tensor:
        return torch.where(rows.valid, values, zero)

    share, new = _sharing(spec.ratio, rows, read), read(logprobs)
    log_ratio, log_importance = zero, None
    if rows.old_logprobs is not None:
        log_ratio = share(read(logprobs - rows.old_logprobs))
        if rows.behaviour_logprobs is not None:
            log_importance = share(read(rows.old_logprobs - rows.behaviour_logprobs))
    ref, advantages = (None if one is None else read(one) for one in (rows.ref_logprobs, rows.advantages))
    terms = row_terms(
        new, read(entropy), log_ratio, log_importance, ref, read(rows.token_weights), advantages, spec.record.formula,
        share if spec.record.by_ratio else unchanged, KL_ESTIMATORS[spec.kl_estimator], spec.numbers,
    )  # fmt: skip
    found = Coefficients(*terms)
    return found._replace(clipped=torch.zeros_like(rows.valid) | found.clipped)


def segment_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums of consecutive segments; in order, hence bitwise the same on every repeat."""
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True, initial=0)


def _sharing(ratio: str, rows: Rows, read: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """What the ratio makes of the tokens' values, zero where a row is not valid: their own, or their sequence's.

    All three are linear and their own transposes: the derivatives by the shared log-ratios go back by the same map.
    """
    if ratio == "token":
        return unchanged
    lengths = rows.lengths
    assert lengths is not None

    def of_sequence(values: Tensor) -> Tensor:
        return segment_sums(values, lengths).repeat_interleave(lengths, output_size=values.numel())

    if ratio == "sequence":
        return lambda values: read(of_sequence(values))
    counts = of_sequence(rows.valid.float()).clamp(min=1)
    return lambda values: read(of_sequence(values)) / counts
