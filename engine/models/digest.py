"""Digests of tensors: what two holders of the same weights compare instead of the weights.

A digest is a sum of ``mix(bits)`` over a tensor's elements, each taken by its bit pattern. It does not depend on the
order of the elements, so a copy that is laid out otherwise has the same one; a zero counts nothing, so padding with
zeros changes nothing; and the digest of a matrix fused of several is the sum of theirs. Any change of one 16-bit
element changes it. Several changes that would cancel in a plain sum, one element up by a unit in the last place and
another one down (common in bf16 at small learning rates), do not cancel here, since ``mix`` is far from linear; that
they do by chance has a probability of about 2**-32, as has a change of one 32-bit element.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

MULTIPLIER = 0x9E3779B1 - 2**32
"""2**32 over the golden ratio, as a signed number: Fibonacci hashing's (Knuth, vol. 3, 6.4)."""
CHUNK = 2**17
"""Elements mixed at a time on a CPU: few enough for its cache."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # of 8 bytes each half is an element


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """The digest of a tensor of any shape and layout, as int64 [] on its device; nothing waits for the device."""
    bits = tensor.detach().reshape(-1).view(_BITS[tensor.element_size()])
    if bits.is_cuda:  # hundreds of tensors a hand-over: a launch for each, not a dozen
        from kernels.triton import digest as on_gpu

        return on_gpu.digest(bits, MULTIPLIER)
    parts = [_mixed(chunk).sum(dtype=torch.int64) for chunk in bits.split(CHUNK)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def _mixed(bits: Tensor) -> Tensor:
    """Multiply, fold the high bits onto the low ones, then x (2 x + 1), which is RC6's: modulo 2**32. Zero stays."""
    mixed = bits.to(torch.int32, copy=True).mul_(MULTIPLIER)
    mixed ^= mixed >> 15
    return mixed.addcmul_(mixed, mixed, value=2)


def read(digests: Sequence[Tensor]) -> list[int]:
    """Their values, of digests on one device; waits for it once."""
    return torch.stack(list(digests)).tolist() if digests else []


def of_model(model: nn.Module) -> str:
    """One digest of all parameters of a model, 64 hexadecimal digits: of their names, shapes, dtypes and values.

    Parameters have to be whole, as they are before ZeRO-3 takes a model apart; a tied one counts once, and the order
    that they come in does not matter.
    """
    named = sorted(model.named_parameters(), key=lambda pair: pair[0])
    whole = hashlib.sha256()
    for (name, parameter), value in zip(named, read([digest(one).cpu() for _, one in named]), strict=True):
        whole.update(f"{name} {list(parameter.shape)} {parameter.dtype} {value}\n".encode())
    return whole.hexdigest()
