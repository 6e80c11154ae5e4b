"""What the functions share as ``torch.library`` ops (namespace ``tandem``), so that torch.compile takes them whole.

An op reads tensor values, chooses the backend and runs it; its fake twin says what shapes come out. Ops have no
optional outputs: a gradient that was not asked for is an empty tensor.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from kernels.head import Gradients, Needs

GIB = 1 << 30

Sizes = tuple[int, int, int, torch.dtype, torch.dtype]
"""What gradients are made in: rows, vocabulary, width, dtype, and the bias's dtype."""


def head_arguments(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float | Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """One head as the ops take it: kernels step through a bias by one and multiply each row by a factor."""
    return hidden, weight, None if bias is None else bias.contiguous(), targets, row_factors(hidden, temperature)


def row_factors(hidden: Tensor, temperature: float | Tensor) -> Tensor:
    """The inverse temperature of each row, fp32."""
    if isinstance(temperature, Tensor):
        return temperature.detach().float().reciprocal()
    return torch.full((len(hidden),), 1 / temperature, dtype=torch.float32, device=hidden.device)


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


def sizes_of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Sizes:
    """Those of the gradients by these inputs."""
    bias_dtype = hidden.dtype if bias is None else bias.dtype
    return hidden.shape[0], weight.shape[0], weight.shape[1], hidden.dtype, bias_dtype


def fake_gradients(needs: Needs, sizes: Sizes, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The fake twin of :func:`as_outputs`."""
    rows, vocabulary, width, dtype, bias_dtype = sizes
    shapes, dtypes = ((rows, width), (vocabulary, width), (vocabulary,)), (dtype, dtype, bias_dtype)
    dhidden, dweight, dbias = (
        like.new_empty(shape, dtype=kind) if need else like.new_empty(0)
        for shape, kind, need in zip(shapes, dtypes, needs, strict=True)
    )
    return dhidden, dweight, dbias


def fake_columns(like: Tensor, *columns: tuple[int, torch.dtype]) -> list[Tensor]:
    """Fake vectors of the given sizes and dtypes."""
    return [like.new_empty(size, dtype=dtype) for size, dtype in columns]
