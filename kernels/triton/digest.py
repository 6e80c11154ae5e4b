"""The sum that ``engine.models.digest`` takes of a tensor, in one launch and one pass over memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
"""Elements of a program."""


@triton.jit(do_not_specialize=["N"])
def add_mixed(bits_ptr, total_ptr, N, MULTIPLIER: tl.constexpr, BLOCK: tl.constexpr):
    """Adds up the mixed elements; an integer sum is the same in any order."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mixed = tl.load(bits_ptr + places, mask=places < N, other=0).to(tl.int32) * MULTIPLIER
    mixed ^= mixed >> 15
    mixed += 2 * mixed * mixed
    tl.atomic_add(total_ptr, tl.sum(mixed.to(tl.int64)))


def digest(bits: Tensor, multiplier: int) -> Tensor:
    """The digest of contiguous integers [n] of up to 32 bits, as int64 [] on their device.

    Args:
        multiplier: an int32, as ``engine.models.digest`` mixes with.
    """
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    if bits.numel():
        add_mixed[(triton.cdiv(bits.numel(), BLOCK),)](bits, total, bits.numel(), multiplier, BLOCK, num_warps=8)
    return total
