"""A sum and its RMSNorm in one pass over memory: a row stays in registers between the two.

What is kept for the backward pass is the sum alone: a row's mean square costs nothing once the row is there.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.triton.scanner import processors

TILE = 2048
"""Numbers that a program holds at a time, in whole rows; a longer row is held whole."""
PROGRAMS = 4
"""Programs of a backward pass on each multiprocessor: enough in flight to hide memory, few partial sums to add."""


@triton.jit(do_not_specialize=["N"])
def add_and_norm(
    residual_ptr, branch_ptr, weight_ptr, sum_ptr, normed_ptr, N, eps,
    H: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr, BRANCH: tl.constexpr,
):  # fmt: skip
    """sum = residual + branch and normed = sum·rsqrt(mean(sum²) + eps)·weight of BN rows."""
    rows = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    hs = tl.arange(0, BH)
    inside = (rows < N)[:, None] & (hs < H)[None, :]
    places = rows[:, None] * H + hs[None, :]
    total = tl.load(residual_ptr + places, mask=inside, other=0.0)
    if BRANCH:
        total += tl.load(branch_ptr + places, mask=inside, other=0.0).to(tl.float32)
        tl.store(sum_ptr + places, total, mask=inside)
    scale = tl.rsqrt(tl.sum(total * total, 1) / H + eps)
    weight = tl.load(weight_ptr + hs, mask=hs < H, other=0.0).to(tl.float32)
    normed = total * scale[:, None] * weight[None, :]
    tl.store(normed_ptr + places, normed.to(normed_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["N"])
def add_and_norm_backward(
    dsum_ptr, dnormed_ptr, sum_ptr, weight_ptr, dresidual_ptr, dbranch_ptr, partial_ptr, N, eps,
    H: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr, DSUM: tl.constexpr, BRANCH: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    """With y = sum·scale and g = dnormed·weight: d = dsum + scale·(g − y·mean(g·y)), by residual and branch alike.

    A program goes through the rows in steps of the whole grid, and leaves its part of Σ dnormed·y in ``partial``.
    """
    hs = tl.arange(0, BH)
    weight = tl.load(weight_ptr + hs, mask=hs < H, other=0.0).to(tl.float32)
    partial = tl.zeros((BN, BH), dtype=tl.float32)
    stride = tl.num_programs(0).to(tl.int64) * BN
    for first in range(tl.program_id(0).to(tl.int64) * BN, N, stride):
        rows = first + tl.arange(0, BN)
        inside = (rows < N)[:, None] & (hs < H)[None, :]
        places = rows[:, None] * H + hs[None, :]
        total = tl.load(sum_ptr + places, mask=inside, other=0.0)
        gradient = tl.load(dnormed_ptr + places, mask=inside, other=0.0).to(tl.float32)
        if DSUM:  # asked for before the sums over the row, which all wait for
            dsum = tl.load(dsum_ptr + places, mask=inside, other=0.0)
        g = gradient * weight[None, :]
        squares, products = tl.sum(total * total, 1), tl.sum(g * total, 1)
        scale = tl.rsqrt(squares / H + eps)[:, None]
        y = total * scale
        if WEIGHT:
            partial += gradient * y
        d = scale * (g - y * (scale * (products / H)[:, None]))
        if DSUM:
            d += dsum
        tl.store(dresidual_ptr + places, d, mask=inside)
        if BRANCH:
            tl.store(dbranch_ptr + places, d.to(dbranch_ptr.dtype.element_ty), mask=inside)
    if WEIGHT:
        tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * H + hs, tl.sum(partial, 0), mask=hs < H)


def _shape(width: int) -> dict[str, int]:
    """Rows and columns of a program, and warps for it: eight numbers a thread are a whole load of 16-bit ones."""
    columns = triton.next_power_of_2(width)
    rows = min(64, max(1, TILE // columns))
    return {"BN": rows, "BH": columns, "num_warps": min(16, max(4, rows * columns // 256))}


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, residual: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        width, rows = len(weight), residual.numel() // len(weight)
        plain = residual.contiguous()
        total = plain if branch is None else torch.empty_like(plain)
        normed = torch.empty_like(plain, dtype=weight.dtype)
        shape = _shape(width)
        if rows > 0:
            add_and_norm[(triton.cdiv(rows, shape["BN"]),)](
                plain, plain if branch is None else branch.contiguous(), weight.contiguous(), total, normed, rows, eps,
                H=width, BRANCH=branch is not None, **shape,
            )  # fmt: skip
        ctx.set_materialize_grads(False)
        # The parameter itself is saved: ZeRO-3 swaps its storage out between the passes.
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.branch_dtype = eps, None if branch is None else branch.dtype
        return residual if branch is None else total, normed

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dsum: Tensor | None, dnormed: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        if dnormed is None:
            dbranch = None if dsum is None or ctx.branch_dtype is None else dsum.to(ctx.branch_dtype)
            return dsum, dbranch, None, None
        width, rows = len(weight), total.numel() // len(weight)
        shape, needs_weight = _shape(width), ctx.needs_input_grad[2]
        programs = min(triton.cdiv(rows, shape["BN"]), PROGRAMS * processors(total.device))
        dresidual = torch.empty_like(total)
        dbranch = None if ctx.branch_dtype is None else torch.empty_like(total, dtype=ctx.branch_dtype)
        partial = total.new_empty(programs if needs_weight else 0, width)
        if rows > 0:
            add_and_norm_backward[(programs,)](
                total if dsum is None else dsum.contiguous(), dnormed.contiguous(), total, weight.contiguous(),
                dresidual, dresidual if dbranch is None else dbranch, partial, rows, ctx.eps,
                H=width, DSUM=dsum is not None, BRANCH=dbranch is not None, WEIGHT=needs_weight, **shape,
            )  # fmt: skip
        return dresidual, dbranch, partial.sum(0).to(weight.dtype) if needs_weight else None, None


def add_rms_norm(residual: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See :func:`kernels.add_rms_norm`."""
    total, normed = _AddRMSNorm.apply(residual, branch, weight, float(eps))
    return total, normed
