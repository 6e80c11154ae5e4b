"""``add_rms_norm``: a residual stream's sum and its RMSNorm."""

import torch
from torch import Tensor

from kernels.checks import DTYPES, Checker, short
from kernels.dispatch import resolve
from kernels.ops import running_on


def add_rms_norm(
    residual: Tensor, branch: Tensor | None, weight: Tensor, eps: float, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """A residual stream in fp32: adds a layer's branch to it, and gives the next layer its RMSNorm in 16 bits.

    sum = residual + branch and normed = sum · rsqrt(mean(sum²) + eps) · weight (Zhang and Sennrich, arXiv 1910.07467),
    all in fp32, normed rounded once. Differentiable in residual, branch and weight through both outputs; sums over rows
    have a fixed order.

    Args:
        residual: ``[..., H]`` fp32.
        branch: the same shape, bf16, fp16 or fp32; None adds nothing, and the sum is the residual itself.
        weight: ``[H]`` bf16, fp16 or fp32; the parameter itself, which ZeRO-3 may swap out between the passes.
        eps: above 0.
        backend: as in :func:`linear_logprob`.

    Returns:
        (sum, normed), ``[..., H]`` fp32 and ``[..., H]`` in weight's dtype.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`linear_logprob`.
    """
    _check(residual, branch, weight, eps, backend)
    module = resolve("add_rms_norm", residual.device, backend)
    with running_on(residual.device):
        found: tuple[Tensor, Tensor] = module.add_rms_norm(residual, branch, weight, eps)
    return found


def _check(residual: Tensor, branch: Tensor | None, weight: Tensor, eps: float, backend: str | None) -> None:
    """Check the arguments of :func:`kernels.add_rms_norm`."""
    check, names = Checker("add_rms_norm"), ", ".join(map(short, DTYPES))
    check.tensor("weight", weight, 1, "[H] of " + names)
    fits = weight.dtype in DTYPES and len(weight) > 0
    check.require(fits, "weight", weight, "[H] of " + names + ", H at least 1")
    expected = ("[..., {}] float32 on {} like weight", len(weight), weight.device)
    check.tensor("residual", residual, max(1, getattr(residual, "ndim", 1)), *expected)
    fits = residual.shape[-1] == len(weight) and residual.dtype == torch.float32 and residual.device == weight.device
    check.require(fits, "residual", residual, *expected)
    if branch is not None:
        like_residual = ("{} of " + names + " on {} like residual", list(residual.shape), residual.device)
        check.tensor("branch", branch, residual.dim(), *like_residual)
        fits = branch.shape == residual.shape and branch.dtype in DTYPES and branch.device == residual.device
        check.require(fits, "branch", branch, *like_residual)
    check.number("eps", eps, "a number above 0", 0, strict=True)
    check.backend(backend)
    check.no_tangents(residual, branch, weight)
