"""The policy loss's coefficients of a chunk of rows in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import coefficients as plain
from kernels.coefficients import KL_ROUNDING, LOG_RATIO_LIMIT, Coefficients, PolicySpec, Rows
from kernels.triton.rows import aligned

LIMIT = tl.constexpr(LOG_RATIO_LIMIT)
ROUNDING = tl.constexpr(KL_ROUNDING)
BLOCK = 256


@triton.jit
def _clamped(x):
    return tl.minimum(tl.maximum(x, -LIMIT), LIMIT)


@triton.jit(do_not_specialize=["T"])
def token_coefficients(
    logprob_ptr, entropy_ptr, valid_ptr, weight_ptr, advantage_ptr, old_ptr, ref_ptr, behaviour_ptr,
    loss_ptr, dlogprob_ptr, dentropy_ptr, ratio_ptr, clipped_ptr, clamped_ptr,
    clip_low, clip_high, dual_clip, kl_coef, entropy_coef, is_cap, T, BLOCK: tl.constexpr,
    LOSS: tl.constexpr, KL: tl.constexpr, HAS_OLD: tl.constexpr, IMPORTANCE: tl.constexpr, DUAL: tl.constexpr,
):  # fmt: skip
    """:func:`kernels.coefficients.row_coefficients` for token ratios, where the formulas are."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < T
    valid = tl.load(valid_ptr + rows, mask=inside, other=0) != 0
    # What an ignored row holds is not read.
    new = tl.load(logprob_ptr + rows, mask=valid, other=0.0)
    entropy = tl.load(entropy_ptr + rows, mask=valid, other=0.0)
    weight = tl.load(weight_ptr + rows, mask=valid, other=0.0)
    counts = weight != 0  # what another row holds, NaN perhaps, must not reach a gradient
    ratio = tl.full((BLOCK,), 1.0, dtype=tl.float32)
    clipped = valid & (ratio < 0)
    clamped = clipped
    ratio_clamped = clipped
    policy_weight = weight
    old = new
    if HAS_OLD:
        old = tl.load(old_ptr + rows, mask=valid, other=0.0)
        log_ratio = new - old
        ratio = tl.exp(_clamped(log_ratio))
        ratio_clamped = tl.abs(log_ratio) > LIMIT
        clamped |= ratio_clamped
        if IMPORTANCE:
            log_importance = old - tl.load(behaviour_ptr + rows, mask=valid, other=0.0)
            importance = tl.minimum(tl.exp(_clamped(log_importance)), is_cap)
            policy_weight = tl.where(counts, policy_weight * importance, 0.0)
            clamped |= tl.abs(log_importance) > LIMIT

    policy = -new
    dpolicy = -policy_weight
    if LOSS != "likelihood":
        advantage = tl.load(advantage_ptr + rows, mask=valid, other=0.0)
        if LOSS == "reinforce":
            policy *= advantage
            dpolicy = tl.where(counts, dpolicy * advantage, 0.0)
        else:
            plain = ratio * advantage
            bounded = tl.minimum(tl.maximum(ratio, 1 - clip_low), 1 + clip_high) * advantage
            clipped |= valid & (bounded < plain)
            policy = -tl.minimum(plain, bounded)
            if DUAL:
                floor = -dual_clip * advantage
                clipped |= valid & (advantage < 0) & (policy > floor)
                policy = tl.where(advantage < 0, tl.minimum(policy, floor), policy)
            dpolicy = tl.where(clipped | ratio_clamped | ~counts, 0.0, dpolicy * plain)

    loss = policy
    dlogprob = dpolicy
    if KL != "":
        delta = new - tl.load(ref_ptr + rows, mask=valid, other=0.0)
        delta = tl.where(tl.abs(delta) <= ROUNDING * tl.maximum(tl.abs(new), 1.0), 0.0, delta)
        if KL == "k3":
            inverse = tl.exp(_clamped(-delta))
            kl_clamped = tl.abs(delta) > LIMIT
            clamped |= kl_clamped
            kl = inverse - 1 + delta
            dkl = 1 - tl.where(kl_clamped, 0.0, inverse)
        else:
            kl = delta if KL == "k1" else delta * delta / 2
            dkl = delta
        loss += kl_coef * kl
        dlogprob += policy_weight * kl_coef * tl.where(counts, dkl, 0.0)

    loss = policy_weight * loss - weight * entropy_coef * entropy
    tl.store(loss_ptr + rows, tl.where(counts, loss, 0.0), mask=inside)
    tl.store(dlogprob_ptr + rows, tl.where(valid, dlogprob, 0.0), mask=inside)
    tl.store(dentropy_ptr + rows, -weight * entropy_coef, mask=inside)
    tl.store(ratio_ptr + rows, tl.where(valid, ratio, 1.0), mask=inside)
    tl.store(clipped_ptr + rows, clipped, mask=inside)
    tl.store(clamped_ptr + rows, clamped & valid, mask=inside)


def row_coefficients(spec: PolicySpec, logprobs: Tensor, entropy: Tensor, rows: Rows) -> Coefficients:
    """See :func:`kernels.coefficients.row_coefficients`."""
    if spec.ratio != "token":
        return plain.row_coefficients(spec, logprobs, entropy, rows)
    found = Coefficients(
        *(torch.empty_like(logprobs) for _ in range(4)), *(torch.empty_like(rows.valid) for _ in range(2))
    )
    if len(logprobs) == 0:
        return found

    def given(value: Tensor | None) -> Tensor:
        return logprobs if value is None else aligned(value)

    token_coefficients[(triton.cdiv(len(logprobs), BLOCK),)](
        logprobs, entropy, aligned(rows.valid), given(rows.token_weights), given(rows.advantages),
        given(rows.old_logprobs), given(rows.ref_logprobs), given(rows.behaviour_logprobs), *found,
        float(spec.clip_low), float(spec.clip_high), float(spec.dual_clip or 0), float(spec.kl_coef),
        float(spec.entropy_coef), float(spec.is_cap or 0), len(logprobs), BLOCK, LOSS=spec.loss,
        KL=spec.kl_estimator if rows.ref_logprobs is not None and spec.kl_coef > 0 else "",
        HAS_OLD=rows.old_logprobs is not None,
        IMPORTANCE=rows.behaviour_logprobs is not None and spec.is_cap is not None,
        DUAL=spec.dual_clip is not None,
    )  # fmt: skip
    return found
