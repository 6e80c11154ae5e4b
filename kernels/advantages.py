"""``gae``: advantages and returns over packed sequences."""

from typing import Any

import torch
from torch import Tensor

from kernels.checks import Checker, read_bounds, reads_values
from kernels.dispatch import resolve
from kernels.ops import running_on


def gae(
    rewards: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    gamma: float,
    lam: float,
    *,
    bootstrap: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates over packed sequences (Schulman et al., arXiv 1506.02438, eq. 16).

    δ_t = r_t + γ·V_{t+1} − V_t and A_t = δ_t + γ·λ·A_{t+1} within each sequence; returns are A + V.

    Args:
        rewards, values: ``[T]`` fp32, one sequence after another.
        cu_seqlens: ``[sequences + 1]`` int32 or int64, the sequences' bounds, on rewards' device or the CPU; empty
            sequences are fine.
        gamma, lam: γ and λ, 0 to 1.
        bootstrap: ``[sequences]`` fp32, the value after each sequence's last token; zeros if None.
        backend: as in :func:`linear_logprob`.

    Returns:
        (advantages, returns), ``[T]`` fp32 without gradient.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`linear_logprob`.
    """
    _check(rewards, values, cu_seqlens, gamma, lam, bootstrap, backend)
    bootstrap = None if bootstrap is None else bootstrap.detach()
    return gae_op(rewards.detach(), values.detach(), cu_seqlens, gamma, lam, bootstrap, backend)


def _check(
    rewards: Tensor, values: Tensor, cu_seqlens: Tensor, gamma: float, lam: float, bootstrap: Any, backend: str | None
) -> None:
    """Check the arguments of :func:`kernels.gae`."""
    check = Checker("gae")
    check.tensor("rewards", rewards, 1, "[T] float32")
    check.require(rewards.dtype == torch.float32, "rewards", rewards, "[T] float32")
    check.bounds("cu_seqlens", cu_seqlens, rewards.device)
    for name, value, size in (("values", values, len(rewards)), ("bootstrap", bootstrap, len(cu_seqlens) - 1)):
        if value is not None or name == "values":
            check.row(name, value, size, rewards.device)
            check.require(value.dtype == torch.float32, name, value, "[{}] float32", size)
    for name, number in (("gamma", gamma), ("lam", lam)):
        check.number(name, number, "a number from 0 to 1", 0)
        check.require(number <= 1, name, number, "a number from 0 to 1")
    check.backend(backend)


@torch.library.custom_op("tandem::gae", mutates_args=())
def gae_op(
    rewards: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    gamma: float,
    lam: float,
    bootstrap: Tensor | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """See :func:`kernels.gae`."""
    if reads_values(cu_seqlens.device):
        read_bounds("gae", cu_seqlens, len(rewards))
    module = resolve("gae", rewards.device, backend)
    with running_on(rewards.device):
        return module.gae(rewards, values, cu_seqlens.to(rewards.device), gamma, lam, bootstrap)


@gae_op.register_fake
def _(rewards: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rewards), torch.empty_like(rewards)
