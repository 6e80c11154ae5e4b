"""Backend "cpu": the passes over a chunk's logits in C++ (csrc/cpu), threaded by ATen and vectorised."""

from functools import cache

import torch
from torch import Tensor

from kernels import _cpu
from kernels.head import Head, RowGradients, Statistics, product_dtype
from kernels.head import linear_logits as cast_linear_logits


def bytes_per_row(hidden: Tensor, head: Head) -> int:
    """fp32 logits, their gradient, and fp32 copies of the row of hidden and of its gradient."""
    vocabulary, width = head.weight.shape
    return (4 + product_dtype(hidden.dtype).itemsize) * vocabulary + 8 * width


def scan(hidden: Tensor, head: Head, targets: Tensor, logits: Tensor) -> Statistics:
    """See :class:`kernels.head.Backend`."""
    linear_logits(hidden, head.weight, logits)
    bias = None if head.bias is None else head.bias.detach().float().contiguous()
    return Statistics(
        *_cpu.statistics(logits, bias, targets.contiguous(), head.inverse_temperature.contiguous(), head.softcap or 0.0)
    )


def dlogits(
    logits: Tensor, head: Head, targets: Tensor, rows: Tensor, statistics: Statistics, grads: RowGradients
) -> Tensor:
    """See :class:`kernels.head.Backend`. In place where every row is live and nothing is rounded."""
    dtype = product_dtype(head.weight.dtype)
    in_place = dtype == torch.float32 and len(rows) == len(logits)
    out = logits if in_place else logits.new_empty(len(rows), logits.shape[1], dtype=dtype)
    _cpu.dlogits(
        logits,
        targets.contiguous(),
        rows,
        [value.contiguous() for value in statistics],
        [value.contiguous() for value in grads],
        head.inverse_temperature.contiguous(),
        head.softcap or 0.0,
        out,
    )
    return out


def linear_logits(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    """out = hidden·weightᵀ in fp32: bf16 operands as they are where the CPU can, else converted in blocks."""
    packs = weight.dtype == torch.bfloat16 and weight.stride(1) == 1 and weight.shape[1] % 2 == 0
    if packs and has_bfloat16_products():
        _cpu.linear_logits(hidden.contiguous(), weight, out)
    else:
        cast_linear_logits(hidden, weight, out)


@cache
def has_bfloat16_products() -> bool:
    """Whether this CPU multiplies bf16 into fp32."""
    return _cpu.has_linear_logits()


def gae(
    rewards: Tensor, values: Tensor, cu_seqlens: Tensor, gamma: float, lam: float, bootstrap: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See :func:`kernels.gae`."""
    after = None if bootstrap is None else bootstrap.detach().contiguous()
    advantages, returns = _cpu.gae(
        rewards.contiguous(), values.contiguous(), cu_seqlens.long().contiguous(), gamma, lam, after
    )
    return advantages, returns
