"""``linear_kl``: the exact KL divergence of two heads' distributions."""

from typing import Any

import torch
from torch import Tensor

from kernels.checks import Checker, check_settings, check_values, check_weight
from kernels.chunked import NO_GRADIENT_BYTES
from kernels.dispatch import resolve
from kernels.head import Head
from kernels.ops import (
    GIB,
    as_needs,
    as_outputs,
    asked_for,
    fake_columns,
    fake_gradients,
    row_factors,
    running_on,
    sizes_of,
)

DIRECTIONS = ("reverse", "forward")


def linear_kl(
    hidden_p: Tensor,
    weight_p: Tensor,
    hidden_q: Tensor,
    weight_q: Tensor,
    *,
    direction: str = "reverse",
    bias_p: Tensor | None = None,
    bias_q: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    workspace_gib: float = 1.25,
    backend: str | None = None,
) -> Tensor:
    """Exact KL divergence between two heads' distributions over the whole vocabulary, row by row.

    The logits of both exist a chunk of rows at a time. Differentiable in p's hidden, weight and bias for any upstream
    gradient; q is a constant. The backward pass makes the logits again. A token that p excludes (logit −inf) counts
    nothing; one that the first distribution allows and the second excludes makes the row infinite, without a gradient
    worth having.

    Args:
        hidden_p, weight_p, bias_p: ``[T, H]``, ``[V, H]`` and ``[V]``, as in :func:`linear_logprob`.
        hidden_q, weight_q, bias_q: the same of the other model, whose width and dtype may differ, on the same device.
        direction: ``"reverse"`` for KL(p‖q), ``"forward"`` for KL(q‖p).
        temperature, softcap: as in :func:`linear_logprob`, for both.
        workspace_gib, backend: as in :func:`linear_logprob`.

    Returns:
        fp32 ``[T]``, nats, at least 0.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`linear_logprob`.
    """
    check = Checker("linear_kl")
    check_weight(check, "_p", hidden_p, weight_p, bias_p)
    check_weight(check, "_q", hidden_q, weight_q, bias_q, len(weight_p))
    fits = len(hidden_q) == len(hidden_p) and hidden_q.device == hidden_p.device
    check.require(fits, "hidden_q", hidden_q, "[{}, H] on {} like hidden_p", len(hidden_p), hidden_p.device)
    check.choice("direction", direction, DIRECTIONS)
    check_settings(check, hidden_p, temperature, softcap, workspace_gib, backend)
    check.no_tangents(hidden_p, weight_p, bias_p)
    bias_q = None if bias_q is None else bias_q.detach()
    divergence, _, _ = kl_op(
        hidden_p, weight_p, bias_p, hidden_q.detach(), weight_q.detach(), bias_q,
        row_factors(hidden_p, temperature), softcap, direction, workspace_gib * GIB, backend,
    )  # fmt: skip
    return divergence


@torch.library.custom_op("tandem::linear_kl", mutates_args=())
def kl_op(
    hidden_p: Tensor,
    weight_p: Tensor,
    bias_p: Tensor | None,
    hidden_q: Tensor,
    weight_q: Tensor,
    bias_q: Tensor | None,
    inverse_temperature: Tensor,
    softcap: float | None,
    direction: str,
    workspace: float,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`kernels.linear_kl`; gives the KL and both logsumexps."""
    check_values("linear_kl", None, len(weight_p), 0, inverse_temperature)
    module = resolve("linear_kl", hidden_p.device, backend)
    head_p = Head(weight_p, bias_p, inverse_temperature, softcap)
    head_q = Head(weight_q, bias_q, inverse_temperature, softcap)
    with running_on(hidden_p.device):
        workspace = min(workspace, NO_GRADIENT_BYTES)
        return module.linear_kl(hidden_p, head_p, hidden_q, head_q, direction, workspace)


@kl_op.register_fake
def _(hidden_p: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(fake_columns(hidden_p, *[(hidden_p.shape[0], torch.float32)] * 3))


@torch.library.custom_op("tandem::linear_kl_backward", mutates_args=())
def kl_backward_op(
    dkl: Tensor,
    kl: Tensor,
    lse_p: Tensor,
    lse_q: Tensor,
    hidden_p: Tensor,
    weight_p: Tensor,
    bias_p: Tensor | None,
    hidden_q: Tensor,
    weight_q: Tensor,
    bias_q: Tensor | None,
    inverse_temperature: Tensor,
    softcap: float | None,
    direction: str,
    needs: list[bool],
    workspace: float,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by p's side; scans both heads again."""
    module = resolve("linear_kl", hidden_p.device, backend)
    head_p = Head(weight_p, bias_p, inverse_temperature, softcap)
    head_q = Head(weight_q, bias_q, inverse_temperature, softcap)
    with running_on(hidden_p.device):
        gradients = module.linear_kl_backward(
            dkl, kl, lse_p, lse_q, hidden_p, head_p, hidden_q, head_q, direction, as_needs(needs), workspace
        )
    return as_outputs(gradients, hidden_p)


@kl_backward_op.register_fake
def _(
    dkl: Tensor,
    kl: Tensor,
    lse_p: Tensor,
    lse_q: Tensor,
    hidden_p: Tensor,
    weight_p: Tensor,
    bias_p: Tensor | None,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    *_, needs, _, _ = others
    return fake_gradients(as_needs(needs), sizes_of(hidden_p, weight_p, bias_p), hidden_p)


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.softcap, ctx.direction, ctx.workspace, ctx.backend = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output, *tensors)


def _backward(ctx: Any, dkl: Tensor, *_: Tensor) -> tuple[Any, ...]:
    needs = list(ctx.needs_input_grad[:3])
    gradients = kl_backward_op(dkl, *ctx.saved_tensors, ctx.softcap, ctx.direction, needs, ctx.workspace, ctx.backend)
    return *asked_for(as_needs(needs), gradients), *[None] * 8


kl_op.register_autograd(_backward, setup_context=_context)
