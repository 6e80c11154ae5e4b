"""KL divergence of two distributions from sums over unnormalised probabilities, without cancellation."""

import triton
import triton.language as tl

from kernels.triton.maths import LN2

NEAR = tl.constexpr(0.125)
"""Up to this difference of log2-probabilities a series is more exact than a difference of exponentials."""


@triton.jit
def divergence_terms(u_a, u_b, MASKED: tl.constexpr):
    """What has to be summed, for u = log2 e of two unnormalised distributions a and b: four tensors of u's shape.

    e_a, e_b, e_a·d with d = u_a − u_b in bits, and the excess e_b − e_a + e_a·d with d in nats, which is e_a·(d²/2 − …)
    and never negative. MASKED: u may be −inf; where only u_b is, the excess is meaningless.
    """
    e_a, e_b = tl.exp2(u_a), tl.exp2(u_b)
    d = u_a - u_b
    product = e_a * d
    if MASKED:
        product = tl.where(e_a == 0, 0.0, product)  # 0·(−inf) is 0 here
    near = product * d * (0.24022651 + d * (-0.05550411 + d * 0.009618129))
    excess = tl.where(tl.abs(d) < NEAR, near, e_b - e_a + LN2 * product)
    return e_a, e_b, product, excess


@triton.jit
def divergence(sum_a, sum_b, products, excess):
    """KL(a‖b) in nats from the sums of :func:`divergence_terms`; 0 where a has no mass.

    With r = Σe_b / Σe_a it is excess / Σe_a − (r − 1 − log r). Where a and b nearly agree so do the sums, and r − 1 is
    known as (excess − Σe_a·d) / Σe_a to more digits than the sums' own difference has.
    """
    some = sum_a > 0
    inverse = 1.0 / tl.where(some, sum_a, 1.0)
    t = (excess - LN2 * products) * inverse
    series = t * t * (0.5 + t * (-0.33333333 + t * (0.25 + t * (-0.2 + t * 0.16666667))))
    ratio = sum_b * inverse
    offset = tl.where(tl.abs(t) < 0.0625, series, ratio - 1.0 - tl.log(ratio))
    return tl.where(some, excess * inverse - offset, 0.0)
