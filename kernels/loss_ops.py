"""The losses as ops (kernels/ops.py): their gradients are made in the forward pass and wait for the backward.

Nothing may copy a dW of gigabytes on its way to ``.grad``. Were the gradients outputs of the op, scaling them in the
backward pass would be a mutation, which torch.compile turns into a copy. They wait on this side instead
(:class:`_Waiting`); the op's output is a ticket, and the backward op collects them once, scaled in place.
"""

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from kernels import chunked
from kernels.checks import check_values, read_bounds, reads_values
from kernels.coefficients import PolicySpec, Rows
from kernels.dispatch import resolve
from kernels.head import Gradients, Head, Problem
from kernels.ops import as_needs, as_outputs, asked_for, fake_columns, fake_gradients, running_on
from kernels.preference import Pairs, PreferenceSpec


class _Waiting:
    """Gradients between the passes: each is collected once, or dropped with its ticket.

    A ticket is a tensor with a number, made over a buffer of ours, so that gradients whose graph is thrown away without
    a backward pass are freed with the graph.
    """

    class Buffer(bytearray):
        """Python's own cannot be referred to weakly."""

    def __init__(self) -> None:
        self.gradients: dict[int, tuple[Any, Gradients]] = {}
        self.numbers = itertools.count(1)

    def put(self, module: Any, gradients: Gradients) -> Tensor:
        number = next(self.numbers)
        buffer = self.Buffer(number.to_bytes(8, "little"))
        if any(one is not None for one in gradients):
            self.gradients[number] = module, gradients
            weakref.finalize(buffer, self.gradients.pop, number, None).atexit = False
        return torch.frombuffer(buffer, dtype=torch.int64)

    def collect(self, ticket: Tensor) -> tuple[Any, Gradients]:
        found = self.gradients.pop(int(ticket), None)
        if found is None:
            raise RuntimeError("kernels: a loss's backward runs once: it gives the gradients of its forward pass away")
        return found


_waiting = _Waiting()


@torch.library.custom_op("tandem::collect_gradients", mutates_args=())
def collect_gradients(
    ticket: Tensor,
    factor: Tensor,
    needs: list[bool],
    rows: int,
    vocabulary: int,
    width: int,
    dtype: torch.dtype,
    bias_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients that a loss's forward pass left, times the upstream scalar; the sizes are for the fake twin."""
    module, gradients = _waiting.collect(ticket)
    with running_on(factor.device):
        getattr(module, "scale_", _scale)([one for one in gradients if one is not None], factor)
    return as_outputs(gradients, factor)


def _scale(tensors: list[Tensor], factor: Tensor) -> None:
    if factor.device.type == "cpu" and factor == 1:  # on a GPU looking would cost more than multiplying
        return
    for tensor in tensors:
        tensor.mul_(factor)


@collect_gradients.register_fake
def _(
    ticket: Tensor,
    factor: Tensor,
    needs: list[bool],
    rows: int,
    vocabulary: int,
    width: int,
    dtype: torch.dtype,
    bias_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    return fake_gradients(as_needs(needs), rows, vocabulary, width, factor, dtype, bias_dtype)


def _loss_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, *_, ctx.needs, _, _ = inputs
    _, *metrics, ctx.ticket = output
    ctx.mark_non_differentiable(*metrics)
    ctx.inputs = len(inputs)
    bias_dtype = hidden.dtype if bias is None else bias.dtype
    ctx.like = hidden.shape[0], *weight.shape, hidden.dtype, bias_dtype


def _loss_backward(ctx: Any, dloss: Tensor, *_: Tensor) -> tuple[Any, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "kernels: a loss has no second derivative: its gradient was made in the forward pass and has no graph, so "
            "create_graph=True would lose part of it"
        )
    gradients = collect_gradients(ctx.ticket, dloss, ctx.needs, *ctx.like)
    return *asked_for(as_needs(ctx.needs), gradients), *[None] * (ctx.inputs - 3)


def _fake_ticket() -> Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


@torch.library.custom_op("tandem::linear_policy_loss", mutates_args=())
def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    inverse_temperature: Tensor,
    token_weights: Tensor,
    advantages: Tensor | None,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    behaviour_logprobs: Tensor | None,
    cu_seqlens: Tensor | None,
    loss: str,
    clip_low: float,
    clip_high: float,
    kl_coef: float,
    kl_estimator: str,
    entropy_coef: float,
    is_cap: float | None,
    ratio: str,
    dual_clip: float | None,
    softcap: float | None,
    ignore_index: int,
    needs: list[bool],
    workspace: float,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :func:`kernels.linear_policy_loss`; gives its output and the gradients' ticket."""
    check_values("linear_policy_loss", targets, len(weight), ignore_index, inverse_temperature)
    module = resolve("linear_policy_loss", hidden.device, backend)
    spec = PolicySpec(loss, clip_low, clip_high, kl_coef, kl_estimator, entropy_coef, is_cap, ratio, dual_clip)
    bounds = lengths = None
    if cu_seqlens is not None:
        if (spec.ties_rows and any(needs)) or reads_values(cu_seqlens.device):
            bounds = read_bounds("linear_policy_loss", cu_seqlens, len(hidden))
        lengths = cu_seqlens.diff().to(hidden.device, torch.int64) if spec.ties_rows else None
    on_host = None if bounds is None or not spec.ties_rows else _differences(bounds)

    valid = targets != ignore_index
    with running_on(hidden.device):
        data = (token_weights, advantages, old_logprobs, ref_logprobs, behaviour_logprobs)
        rows = Rows._make([valid, *(None if one is None else one.float() for one in data), lengths])
        guesses = (rows.old_logprobs, rows.behaviour_logprobs, rows.ref_logprobs)
        guess = next((one for one in guesses if one is not None), None)
        head = Head(weight, bias, inverse_temperature, softcap)
        problem = Problem(
            hidden, head, torch.where(valid, targets, 0), valid, logprob_guess=guess,
            entropy_gradient=spec.entropy_coef != 0,
        )  # fmt: skip
        found, columns, gradients = chunked.policy_pass(
            module, problem, spec, rows, on_host, as_needs(needs), workspace
        )
        row_loss, ratios, clipped, clamped = columns
        ticket = _waiting.put(module, gradients)
    return row_loss.sum(), found.logprobs, found.entropy, ratios, clipped, clamped, ticket


def _differences(bounds: list[int]) -> list[int]:
    return [stop - start for start, stop in itertools.pairwise(bounds)]


@linear_policy_loss.register_fake
def _(hidden: Tensor, *_: Any) -> tuple[Tensor, ...]:
    rows = hidden.shape[0]
    return (
        hidden.new_empty((), dtype=torch.float32),
        *fake_columns(hidden, *[(rows, torch.float32)] * 3, *[(rows, torch.bool)] * 2),
        _fake_ticket(),
    )


linear_policy_loss.register_autograd(_loss_backward, setup_context=_loss_context)


@torch.library.custom_op("tandem::linear_preference_loss", mutates_args=())
def linear_preference_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    inverse_temperature: Tensor,
    cu_seqlens: Tensor,
    ref_logprobs: Tensor,
    pair_weights: Tensor,
    loss: str,
    beta: float,
    label_smoothing: float,
    softcap: float | None,
    ignore_index: int,
    needs: list[bool],
    workspace: float,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :func:`kernels.linear_preference_loss`; gives loss, log-probabilities, entropies, rewards and ticket."""
    check_values("linear_preference_loss", targets, len(weight), ignore_index, inverse_temperature)
    module = resolve("linear_preference_loss", hidden.device, backend)
    bounds = read_bounds("linear_preference_loss", cu_seqlens, len(hidden))
    valid = targets != ignore_index
    with running_on(hidden.device):
        lengths = torch.tensor(_differences(bounds), dtype=torch.int64).to(hidden.device, non_blocking=True)
        pairs = Pairs(valid, ref_logprobs.float(), pair_weights.float(), lengths)
        head = Head(weight, bias, inverse_temperature, softcap)
        problem = Problem(
            hidden, head, torch.where(valid, targets, 0), valid, logprob_guess=pairs.ref_logprobs,
            entropy_gradient=False,
        )  # fmt: skip
        found, columns, gradients = chunked.preference_pass(
            module, problem, PreferenceSpec(loss, beta, label_smoothing), pairs, _differences(bounds[::2]),
            as_needs(needs), workspace,
        )  # fmt: skip
        pair_loss, chosen, rejected = columns
        ticket = _waiting.put(module, gradients)
    return pair_loss.sum(), found.logprobs, found.entropy, chosen, rejected, ticket


@linear_preference_loss.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor,
    cu_seqlens: Tensor,
    *_: Any,
) -> tuple[Tensor, ...]:
    rows, pairs = hidden.shape[0], cu_seqlens.shape[0] // 2
    sizes = [(size, torch.float32) for size in (rows, rows, pairs, pairs)]
    return hidden.new_empty((), dtype=torch.float32), *fake_columns(hidden, *sizes), _fake_ticket()


linear_preference_loss.register_autograd(_loss_backward, setup_context=_loss_context)
