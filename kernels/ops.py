"""The functions as ``torch.library`` ops, so that torch.compile takes them whole: namespace ``tandem``.

An op reads tensor values, chooses the backend and runs it; its fake twin says what shapes come out. Ops have no
optional outputs: a gradient that was not asked for is an empty tensor. kernels/loss_ops.py has the losses.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from kernels import chunked
from kernels.checks import check_values, read_bounds, reads_values
from kernels.dispatch import resolve
from kernels.head import Gradients, Head, Needs, Problem, RowGradients


@contextmanager
def running_on(device: torch.device) -> Iterator[None]:
    """Where an op works: kernels launch on the current device, and autocast would round the fp32 logits to bf16."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        with torch.autocast(device.type, enabled=False):
            yield


def as_needs(flags: Any) -> Needs:
    """Three flags by hidden, weight and bias."""
    hidden, weight, bias = flags
    return hidden, weight, bias


def as_outputs(gradients: Gradients, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients as an op returns them; ``like`` gives the device and dtype of those that were not asked for."""
    dhidden, dweight, dbias = (like.new_empty(0) if one is None else one.contiguous() for one in gradients)
    return dhidden, dweight, dbias


def asked_for(needs: Needs, outputs: tuple[Tensor, Tensor, Tensor]) -> Gradients:
    """Gradients as an op returned them, as autograd wants them."""
    dhidden, dweight, dbias = (one if need else None for need, one in zip(needs, outputs, strict=True))
    return dhidden, dweight, dbias


def fake_gradients(
    needs: Needs, rows: int, vocabulary: int, width: int, like: Tensor, dtype: torch.dtype, bias_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The fake twin of :func:`as_outputs`."""
    shapes, dtypes = ((rows, width), (vocabulary, width), (vocabulary,)), (dtype, dtype, bias_dtype)
    dhidden, dweight, dbias = (
        like.new_empty(shape, dtype=kind) if need else like.new_empty(0)
        for shape, kind, need in zip(shapes, dtypes, needs, strict=True)
    )
    return dhidden, dweight, dbias


def fake_columns(like: Tensor, *columns: tuple[int, torch.dtype]) -> list[Tensor]:
    """Fake vectors of the given sizes and dtypes."""
    return [like.new_empty(size, dtype=dtype) for size, dtype in columns]


@torch.library.custom_op("tandem::linear_logprob", mutates_args=())
def linear_logprob(
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
    valid = targets != ignore_index
    head = Head(weight, bias, inverse_temperature, softcap)
    with running_on(hidden.device):
        guess = None if anchor is None else anchor.float()
        problem = Problem(hidden, head, torch.where(valid, targets, 0), valid, anchor=guess)
        found = chunked.scan_only(module, problem, workspace)
    return found.logprobs, found.entropy


@linear_logprob.register_fake
def _(hidden: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    logprobs, entropy = (hidden.new_empty(hidden.shape[0], dtype=torch.float32) for _ in range(2))
    return logprobs, entropy


@torch.library.custom_op("tandem::linear_logprob_backward", mutates_args=())
def linear_logprob_backward(
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
    valid = targets != ignore_index
    head = Head(weight, bias, inverse_temperature, softcap)
    with running_on(hidden.device):
        problem = Problem(
            hidden, head, torch.where(valid, targets, 0), valid, logprob_guess=logprobs,
            entropy_gradient=dentropy is not None,
        )  # fmt: skip
        grads = RowGradients(
            torch.where(valid, dlogprob, 0.0), None if dentropy is None else torch.where(valid, dentropy, 0.0)
        )
        gradients = chunked.linear_logprob_backward(module, problem, grads, as_needs(needs), workspace)
    return as_outputs(gradients, hidden)


@linear_logprob_backward.register_fake
def _(
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
    bias_dtype = hidden.dtype if bias is None else bias.dtype
    return fake_gradients(
        as_needs(needs), hidden.shape[0], len(weight), hidden.shape[1], hidden, hidden.dtype, bias_dtype
    )


def _logprob_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, weight, bias, targets, inverse_temperature, _, *ctx.settings = inputs
    ctx.set_materialize_grads(False)
    # The parameter itself is saved: ZeRO-3 swaps its storage out between the passes.
    ctx.save_for_backward(output[0], hidden, weight, bias, targets, inverse_temperature)


def _logprob_backward(ctx: Any, dlogprob: Tensor | None, dentropy: Tensor | None) -> tuple[Any, ...]:
    softcap, ignore_index, workspace, backend = ctx.settings
    needs = list(ctx.needs_input_grad[:3])
    if dlogprob is None:
        dlogprob = torch.zeros_like(ctx.saved_tensors[0])
    gradients = linear_logprob_backward(
        dlogprob, dentropy, *ctx.saved_tensors, softcap, ignore_index, needs, workspace, backend
    )
    return *asked_for(as_needs(needs), gradients), *[None] * 7


linear_logprob.register_autograd(_logprob_backward, setup_context=_logprob_context)


@torch.library.custom_op("tandem::linear_kl", mutates_args=())
def linear_kl(
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
        workspace = min(workspace, chunked.NO_GRADIENT_BYTES)
        return module.linear_kl(hidden_p, head_p, hidden_q, head_q, direction, workspace)


@linear_kl.register_fake
def _(hidden_p: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(fake_columns(hidden_p, *[(hidden_p.shape[0], torch.float32)] * 3))


@torch.library.custom_op("tandem::linear_kl_backward", mutates_args=())
def linear_kl_backward(
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


@linear_kl_backward.register_fake
def _(
    dkl: Tensor, kl: Tensor, lse_p: Tensor, lse_q: Tensor, hidden_p: Tensor, weight_p: Tensor, bias_p: Tensor | None,
    hidden_q: Tensor, weight_q: Tensor, bias_q: Tensor | None, inverse_temperature: Tensor, softcap: float | None,
    direction: str, needs: list[bool], workspace: float, backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    bias_dtype = hidden_p.dtype if bias_p is None else bias_p.dtype
    return fake_gradients(
        as_needs(needs), hidden_p.shape[0], len(weight_p), hidden_p.shape[1], hidden_p, hidden_p.dtype, bias_dtype
    )


def _kl_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.softcap, ctx.direction, ctx.workspace, ctx.backend = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output, *tensors)


def _kl_backward(ctx: Any, dkl: Tensor, *_: Tensor) -> tuple[Any, ...]:
    needs = list(ctx.needs_input_grad[:3])
    gradients = linear_kl_backward(
        dkl, *ctx.saved_tensors, ctx.softcap, ctx.direction, needs, ctx.workspace, ctx.backend
    )
    return *asked_for(as_needs(needs), gradients), *[None] * 8


linear_kl.register_autograd(_kl_backward, setup_context=_kl_context)


@torch.library.custom_op("tandem::gae", mutates_args=())
def gae(
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


@gae.register_fake
def _(rewards: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rewards), torch.empty_like(rewards)
