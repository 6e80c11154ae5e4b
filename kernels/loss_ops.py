"""What the losses share as ops: their gradients are made in the forward pass and wait for the backward.

Nothing may copy a dW of gigabytes on its way to ``.grad``. Were the gradients outputs of the op, scaling them in the
backward pass would be a mutation, which torch.compile turns into a copy. They wait on this side instead
(:class:`_Waiting`); the op's output is a ticket, and the backward op collects them once, scaled in place.

A loss's op has hidden, weight and bias first and ``needs``, workspace and backend last, gives the loss first and the
ticket last, and is made differentiable by :func:`collects_its_gradients`.
"""

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from kernels.head import Gradients
from kernels.ops import as_needs, as_outputs, asked_for, fake_gradients, running_on, sizes_of


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
    return fake_gradients(as_needs(needs), (rows, vocabulary, width, dtype, bias_dtype), factor)


def _loss_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, *_, ctx.needs, _, _ = inputs
    _, *metrics, ctx.ticket = output
    ctx.mark_non_differentiable(*metrics)
    ctx.inputs = len(inputs)
    ctx.sizes = sizes_of(hidden, weight, bias)


def _loss_backward(ctx: Any, dloss: Tensor, *_: Tensor) -> tuple[Any, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "kernels: a loss has no second derivative: its gradient was made in the forward pass and has no graph, so "
            "create_graph=True would lose part of it"
        )
    gradients = collect_gradients(ctx.ticket, dloss, ctx.needs, *ctx.sizes)
    return *asked_for(as_needs(ctx.needs), gradients), *[None] * (ctx.inputs - 3)


def collects_its_gradients(op: Any) -> None:
    """Make a loss's op differentiable: its backward pass collects what its forward pass left."""
    op.register_autograd(_loss_backward, setup_context=_loss_context)


def leave(module: Any, gradients: Gradients) -> Tensor:
    """Leave gradients for the backward pass, to be scaled by a backend's module; the ticket."""
    return _waiting.put(module, gradients)


def fake_ticket() -> Tensor:
    """The fake twin of :func:`leave`."""
    return torch.empty(1, dtype=torch.int64, device="cpu")


def gradients_needed(*inputs: Tensor | None) -> list[bool]:
    """Which gradients a loss has to make in its forward pass."""
    return [torch.is_grad_enabled() and one is not None and one.requires_grad for one in inputs]


def differences(bounds: list[int]) -> list[int]:
    """The lengths between bounds."""
    return [stop - start for start, stop in itertools.pairwise(bounds)]
