"""Multiply gradients by the upstream scalar without reading it on the host."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit(do_not_specialize=["count"])
def scale_in_place(tensor_ptr, factor_ptr, count, BLOCK: tl.constexpr):
    """tensor ·= factor; where the factor is 1, as it is for the loss itself, no element is touched."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        stride = tl.num_programs(0).to(tl.int64) * BLOCK
        for first in range(tl.program_id(0).to(tl.int64) * BLOCK, count, stride):
            places = first + tl.arange(0, BLOCK)
            value = tl.load(tensor_ptr + places, mask=places < count, other=0.0)
            scaled = (value.to(tl.float32) * factor).to(tensor_ptr.dtype.element_ty)
            tl.store(tensor_ptr + places, scaled, mask=places < count)


def scale_(tensors: list[Tensor], factor: Tensor) -> None:
    """See :class:`kernels.head.Backend`."""
    for tensor in tensors:
        count = tensor.numel()
        if count > 0:
            scale_in_place[(min(1024, triton.cdiv(count, BLOCK)),)](tensor, factor, count, BLOCK)
