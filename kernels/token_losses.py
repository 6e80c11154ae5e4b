"""The token losses and KL estimators: every formula once, as scalar code of one token's numbers.

The same code runs in two ways. ``op`` is torch in this file, so that a formula called from Python works on vectors,
one element a token; kernels/triton/formulas.py compiles the code again with ``op`` standing for ``triton.language``,
and it becomes part of a kernel. A formula is therefore made of arithmetic, comparisons, ``&``, ``|``, ``~``, other
formulas, numbers of this file, and what torch and Triton call by one name: ``op.abs``, ``op.clamp``, ``op.exp``,
``op.minimum``, ``op.where``. An ``if`` may ask whether something was given (``is not None``), never what a token's
number is.

A new loss is a formula and a line in LOSSES, and a second writing with autograd in kernels/reference.py, which
tests/kernels/test_token_losses.py holds it against in every combination. A new KL estimator likewise.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch as op

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ±20 before exp, with zero gradient beyond; rows that met the clamp are counted."""

KL_ROUNDING = 2.0**-19
"""Two fp32 log-probabilities that differ by less, relative to their magnitude where that is above 1, are the same."""


class Numbers(NamedTuple):
    """The numbers among the settings of :func:`kernels.linear_policy_loss`. One that may be None is absent if it is."""

    clip_low: float
    clip_high: float
    dual_clip: float | None
    kl_coef: float
    entropy_coef: float
    is_cap: float | None


def bounded_exp(log_ratio):
    """(exp of the log-ratio, which is clamped before; whether it was)."""
    bounded = op.clamp(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return op.exp(bounded), op.abs(log_ratio) > LOG_RATIO_LIMIT


# A loss maps (new, ratio, clamped, advantage, numbers) to (value, slope, clipped). ratio is r = exp(new − old), or that
# of the token's sequence; clamped says whether its logarithm met the clamp, where r has no gradient. slope is the
# value's derivative: by log r if the loss's record in LOSSES has by_ratio, else by new. clipped says whether a clip
# decided the value.


def clip(new, ratio, clamped, advantage, numbers):
    """PPO (arXiv 1707.06347, eq. 7): −min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A).

    With dual_clip = d (arXiv 1912.09729, eq. 5), where A < 0, at most −d·A.
    """
    plain = ratio * advantage
    bounded = op.clamp(ratio, 1 - numbers.clip_low, 1 + numbers.clip_high) * advantage
    value = -op.minimum(plain, bounded)
    clipped = bounded < plain
    if numbers.dual_clip is not None:
        ceiling = -numbers.dual_clip * advantage
        above = (advantage < 0) & (value > ceiling)
        value = op.where(above, ceiling, value)
        clipped = clipped | above
    return value, op.where(clipped | clamped, 0.0, -plain), clipped


def cispo(new, ratio, clamped, advantage, numbers):
    """CISPO (arXiv 2506.13585, eq. 4 and 5): −sg(clip(r, 1 − clip_low, 1 + clip_high))·A·new.

    sg takes its argument for a constant: the clipped ratio is a weight of REINFORCE's gradient, which every token has.
    """
    weight = op.clamp(ratio, 1 - numbers.clip_low, 1 + numbers.clip_high)
    slope = -weight * advantage
    return slope * new, slope, weight != ratio


def reinforce(new, ratio, clamped, advantage, numbers):
    """REINFORCE: −A·new."""
    return -advantage * new, -advantage, False


def likelihood(new, ratio, clamped, advantage, numbers):
    """−new, of samples that are to be imitated (SFT, best-of-K)."""
    return -new, -1.0, False


# A KL estimator maps δ = new − ref to (value, the value's derivative by new, whether δ met a clamp). Values are those
# of http://joschu.net/blog/kl-approx.html.


def k1(delta):
    """δ, with the gradient δ·∇new of the true KL: δ's own has expectation zero; on-policy this one is k2's."""
    return delta, delta, False


def k2(delta):
    """δ²/2."""
    return delta * delta / 2, delta, False


def k3(delta):
    """exp(−δ) − 1 + δ. Beyond the clamp exp stops and δ goes on."""
    inverse_ratio, clamped = bounded_exp(-delta)
    return inverse_ratio - 1 + delta, 1 - op.where(clamped, 0.0, inverse_ratio), clamped


class TokenLoss(NamedTuple):
    """A loss and what it needs."""

    formula: Callable[..., Any]
    advantages: bool = True
    """It is weighted by advantages: without them none are asked for, and no importance weights apply."""
    old: bool = False
    """It depends on the ratio to the old policy."""
    by_ratio: bool = False
    """Its slope is the derivative by the log-ratio, which is shared by the tokens of a sequence where the ratio is the
    sequence's; otherwise it is the derivative by the token's own log-probability."""
    dual_clip: bool = False
    """It takes ``dual_clip``."""


LOSSES = {
    "clip": TokenLoss(clip, old=True, by_ratio=True, dual_clip=True),
    "reinforce": TokenLoss(reinforce),
    "likelihood": TokenLoss(likelihood, advantages=False),
    "cispo": TokenLoss(cispo, old=True),
}
"""By the name that ``kernels.linear_policy_loss`` knows the loss under."""

KL_ESTIMATORS: dict[str, Callable[..., Any]] = {"k1": k1, "k2": k2, "k3": k3}


def unchanged(derivative):
    """The ``pull_back`` where slopes are derivatives by ``new``, as those by a token's own log-ratio new − old are."""
    return derivative


def row_terms(
    new, entropy, log_ratio, log_importance, ref, weight, advantage, loss, pull_back, kl_estimator, numbers
):  # fmt: skip
    """What a row adds to the loss, and its derivatives, as :func:`kernels.coefficients.row_coefficients` says.

    Args:
        new, entropy, weight, advantage: the row's; zeros where the row is not valid.
        log_ratio: new − old or the sequence's.
        log_importance: old − behaviour likewise, or None.
        ref: None without a KL term.
        loss: a formula of LOSSES.
        pull_back: maps the rows' slopes to derivatives by the rows' ``new``.
        kl_estimator: a formula of KL_ESTIMATORS.
        numbers: :class:`Numbers`.

    Returns:
        loss, dlogprob, dentropy, ratio, clipped, clamped; ``clipped`` may be False for all rows in one.
    """
    ratio, ratio_clamped = bounded_exp(log_ratio)
    clamped = ratio_clamped
    counts = weight != 0  # what another row holds, NaN perhaps, must not reach a gradient
    policy_weight = weight
    if log_importance is not None:
        importance, importance_clamped = bounded_exp(log_importance)
        policy_weight = op.where(counts, weight * op.clamp(importance, 0.0, numbers.is_cap), 0.0)
        clamped = clamped | importance_clamped

    value, slope, clipped = loss(new, ratio, ratio_clamped, advantage, numbers)
    dlogprob = pull_back(op.where(counts, policy_weight * slope, 0.0))
    if ref is not None:
        delta = new - ref
        distance = op.abs(delta)
        rounding = (distance <= KL_ROUNDING) | (distance <= op.abs(new) * KL_ROUNDING)
        kl, dkl, kl_clamped = kl_estimator(op.where(rounding, 0.0, delta))
        clamped = clamped | kl_clamped
        value = value + numbers.kl_coef * kl
        dlogprob = dlogprob + policy_weight * numbers.kl_coef * op.where(counts, dkl, 0.0)

    total = policy_weight * value - weight * numbers.entropy_coef * entropy
    return op.where(counts, total, 0.0), dlogprob, -weight * numbers.entropy_coef, ratio, clipped, clamped
