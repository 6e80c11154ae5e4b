"""Generalised advantage estimation over packed sequences: a segmented scan, one program a sequence."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512


@triton.jit
def _then(decay_first, sum_first, decay_second, sum_second):
    """Compose two steps a ↦ decay·a + sum of the recurrence."""
    return decay_first * decay_second, decay_second * sum_first + sum_second


@triton.jit
def advantage_scan(
    reward_ptr, value_ptr, bounds_ptr, bootstrap_ptr, advantage_ptr, return_ptr, gamma, decay,
    BLOCK: tl.constexpr, BOOTSTRAP: tl.constexpr,
):  # fmt: skip
    """A_t = δ_t + γλ·A_{t+1}, from the end of the sequence in blocks; each block is one parallel prefix scan."""
    sequence = tl.program_id(0)
    start, stop = tl.load(bounds_ptr + sequence), tl.load(bounds_ptr + sequence + 1)
    after = 0.0
    if BOOTSTRAP:
        after = tl.load(bootstrap_ptr + sequence)
    carry = tl.zeros((), dtype=tl.float32)
    for offset in range(0, stop - start, BLOCK):
        steps = stop - 1 - offset - tl.arange(0, BLOCK)  # backwards in time
        inside = steps >= start
        value = tl.load(value_ptr + steps, mask=inside, other=0.0)
        following = tl.load(value_ptr + steps + 1, mask=inside & (steps + 1 < stop), other=0.0)
        following = tl.where(steps + 1 == stop, after, following)
        delta = tl.load(reward_ptr + steps, mask=inside, other=0.0) + gamma * following - value
        decays = tl.where(inside, decay, 1.0)
        total, sums = tl.associative_scan((decays, tl.where(inside, delta, 0.0)), 0, _then)
        advantage = sums + total * carry
        tl.store(advantage_ptr + steps, advantage, mask=inside)
        tl.store(return_ptr + steps, advantage + value, mask=inside)
        carry = tl.sum(tl.where(tl.arange(0, BLOCK) == BLOCK - 1, advantage, 0.0), 0)


def gae(
    rewards: Tensor, values: Tensor, cu_seqlens: Tensor, gamma: float, lam: float, bootstrap: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See :func:`kernels.gae`."""
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    sequences = len(cu_seqlens) - 1
    if sequences > 0 and len(rewards) > 0:
        advantage_scan[(sequences,)](
            rewards.contiguous(), values.contiguous(), cu_seqlens.to(rewards.device, non_blocking=True).contiguous(),
            rewards if bootstrap is None else bootstrap.contiguous(), advantages, returns, float(gamma),
            float(gamma * lam), BLOCK, BOOTSTRAP=bootstrap is not None,
        )  # fmt: skip
    return advantages, returns
