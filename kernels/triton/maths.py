"""Elementary functions in fp32 that several kernels need."""

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter."""

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def softcapped(x, cap):
    """cap·tanh(x / cap), exact to fp32's rounding: from one exponential of a number below zero, so without overflow.

    By series near 0, where 1 − t would cancel and a large cap multiply the error.
    """
    t = tl.exp2(tl.abs(x) * (-2.8853900817779268 / cap))
    capped = (1 - t) / (1 + t) * cap
    ratio = x * (1.0 / cap)
    s = ratio * ratio
    series = -0.053968254 + s * (0.021869488 - s * 0.0088632355)
    series = x + x * s * (-0.33333333 + s * (0.13333333 + s * series))
    return tl.where(s < 0.1, series, tl.where(x < 0, -capped, capped))


@triton.jit
def log1p(x):
    """log(1 + x) for x ≥ 0, also where 1 + x rounds to 1."""
    y = 1.0 + x
    return tl.where(y == 1.0, x, tl.log(y) * (x / tl.where(y == 1.0, 1.0, y - 1.0)))


@triton.jit
def softplus(x):
    """log(1 + e^x)."""
    return tl.maximum(x, 0.0) + log1p(tl.exp(-tl.abs(x)))


@triton.jit
def expm1_negative(x):
    """e^x − 1 for x ≤ 0, by series where the difference would cancel."""
    series = x * (1.0 + x * (0.5 + x * (0.16666667 + x * (0.041666668 + x * 0.0083333338))))
    return tl.where(x > -0.1, series, tl.exp(x) - 1.0)
