"""``linear_logprob``: the log-probability of each row's target, and the entropy, under a head."""

from typing import Any

import torch
from torch import Tensor

from kernels import chunked
from kernels.checks import Checker, check_head, check_values
from kernels.dispatch import resolve
from kernels.head import Problem, RowGradients
from kernels.ops import (
    GIB,
    as_needs,
    as_outputs,
    asked_for,
    fake_columns,
    fake_gradients,
    head_arguments,
    running_on,
    sizes_of,
)


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    anchor: Tensor | None = None,
    return_entropy: bool = False,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    workspace_gib: float = 1.25,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability of each row's target under softmax(softcap(hidden·weightᵀ + bias) / temperature).

    The logits exist a chunk of rows at a time. Differentiable in hidden, weight and bias through both outputs, for any
    upstream gradient; the backward pass makes the logits again, and only for rows whose upstream gradient is not zero.

    Args:
        hidden: ``[T, H]`` bf16, fp16 or fp32, any strides.
        weight: ``[V, H]``, hidden's dtype; may be the embedding (tied), may be frozen (then it gets no gradient work).
        targets: ``[T]`` int64 in 0 … V − 1, or ``ignore_index``.
        bias: ``[V]`` fp32 or hidden's dtype; −inf masks a token out, unless a softcap bounds it.
        anchor: ``[T]`` floating, a guess of each row's logsumexp for backends that scan without a running maximum;
            it changes the cost, and the result by rounding alone.
        return_entropy: also give −Σ p·log p.
        temperature: above 0, a number or ``[T]``; not differentiated.
        softcap: z ↦ softcap · tanh(z / softcap), before the temperature.
        ignore_index: rows with this target give 0 and take no gradient.
        workspace_gib: bound on scratch memory, GiB (at least one row of logits; 64 MiB without gradients).
        backend: ``"triton"`` (GPU), ``"cpu"`` or ``"reference"``; None chooses by device.

    Returns:
        fp32 ``[T]`` in nats, or (log-probabilities, entropies).

    Raises:
        ValueError, TypeError: an argument's shape, dtype, device or value is wrong. Values of tensors are checked on
            the CPU, and on a GPU only under ``TANDEM_DEBUG=1``.
        RuntimeError: the backend asked for is not built.
    """
    check = Checker("linear_logprob")
    check_head(check, hidden, weight, targets, bias, temperature, softcap, ignore_index, workspace_gib, backend)
    if anchor is not None:
        check.row("anchor", anchor, len(hidden), hidden.device)
        anchor = anchor.detach()
    head = head_arguments(hidden, weight, bias, targets, temperature)
    logprobs, entropy = logprob_op(*head, anchor, softcap, ignore_index, workspace_gib * GIB, backend)
    return (logprobs, entropy) if return_entropy else logprobs


@torch.library.custom_op("tandem::linear_logprob", mutates_args=())
def logprob_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    inverse_temperature: Tensor,
    anchor: Tensor | None,
    softcap: float | None,
    ignore_index: int,
    workspace: float,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """See :func:`kernels.linear_logprob`; gives log-probabilities and entropies."""
    check_values("linear_logprob", targets, len(weight), ignore_index, inverse_temperature)
    module = resolve("linear_logprob", hidden.device, backend)
    with running_on(hidden.device):
        guess = None if anchor is None else anchor.float()
        problem = Problem.of(
            hidden, weight, bias, targets, inverse_temperature, softcap, ignore_index, anchor=guess
        )  # fmt: skip
        found = chunked.scan_only(module, problem, workspace)
    return found.logprobs, found.entropy


@logprob_op.register_fake
def _(hidden: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    logprobs, entropy = fake_columns(hidden, *[(hidden.shape[0], torch.float32)] * 2)
    return logprobs, entropy


@torch.library.custom_op("tandem::linear_logprob_backward", mutates_args=())
def logprob_backward_op(
    dlogprob: Tensor,
    dentropy: Tensor | None,
    logprobs: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    inverse_temperature: Tensor,
    softcap: float | None,
    ignore_index: int,
    needs: list[bool],
    workspace: float,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients; scans again."""
    module = resolve("linear_logprob", hidden.device, backend)
    with running_on(hidden.device):
        problem = Problem.of(
            hidden, weight, bias, targets, inverse_temperature, softcap, ignore_index, logprob_guess=logprobs,
            entropy_gradient=dentropy is not None,
        )  # fmt: skip
        valid = problem.valid
        grads = RowGradients(
            torch.where(valid, dlogprob, 0.0), None if dentropy is None else torch.where(valid, dentropy, 0.0)
        )
        scanner = module.make_scanner(problem, workspace, as_needs(needs))
        gradients = chunked.backward_all(scanner, len(hidden), grads)
    return as_outputs(gradients, hidden)


@logprob_backward_op.register_fake
def _(
    dlogprob: Tensor,
    dentropy: Tensor | None,
    logprobs: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    *_, needs, _, _ = others
    return fake_gradients(as_needs(needs), sizes_of(hidden, weight, bias), hidden)


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, weight, bias, targets, inverse_temperature, _, *ctx.settings = inputs
    ctx.set_materialize_grads(False)
    # The parameter itself is saved: ZeRO-3 swaps its storage out between the passes.
    ctx.save_for_backward(output[0], hidden, weight, bias, targets, inverse_temperature)


def _backward(ctx: Any, dlogprob: Tensor | None, dentropy: Tensor | None) -> tuple[Any, ...]:
    softcap, ignore_index, workspace, backend = ctx.settings
    needs = list(ctx.needs_input_grad[:3])
    if dlogprob is None:
        dlogprob = torch.zeros_like(ctx.saved_tensors[0])
    gradients = logprob_backward_op(
        dlogprob, dentropy, *ctx.saved_tensors, softcap, ignore_index, needs, workspace, backend
    )
    return *asked_for(as_needs(needs), gradients), *[None] * 7


logprob_op.register_autograd(_backward, setup_context=_context)
