"""Exact KL divergence of two heads, a tile of both heads' logits at a time: the launches."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kernels.chunked import even_spans
from kernels.head import Gradients, Head, Needs, product_dtype
from kernels.logits import CAST_BYTES, HeadGradients
from kernels.triton.hopper.kl import TILE_COLUMNS as HOPPER_COLUMNS
from kernels.triton.hopper.kl import fits_hopper, scan_on_hopper
from kernels.triton.hopper.products import copied_bytes
from kernels.triton.kl_tiles import close_rows, combine_tiles, pair_gradient, scan_pair
from kernels.triton.maths import INTERPRETED
from kernels.triton.scanner import processors

TILE_ROWS = 32 if INTERPRETED else 128
TILE_COLUMNS = 64 if INTERPRETED else 128
BAND = 8
PART_ROWS = 16
PART_TILES = 64


class Side(NamedTuple):
    """One head as the kernels take it."""

    hidden: Tensor
    """``[T, H]``, any strides."""
    weight: Tensor
    """``[V, H]``, any strides."""
    bias: Tensor
    """``[V]``; not looked at without BIAS."""
    strides: tuple[int, ...]
    """Of hidden, then of weight."""

    @classmethod
    def of(cls, hidden: Tensor, head: Head) -> "Side":
        """As problems have it."""
        bias = hidden if head.bias is None else head.bias.contiguous()
        return cls(hidden, head.weight, bias, (*hidden.stride(), *head.weight.stride()))


def _blocks(softcap: float | None, *sides: Side) -> dict[str, Any]:
    """What both passes over the logits are compiled with; fp32 operands or a cap leave room for half as many."""
    wide = softcap is not None or any(
        tensor.dtype == torch.float32 for side in sides for tensor in (side.hidden, side.weight)
    )
    return {
        "BM": min(TILE_ROWS, 64) if wide else TILE_ROWS, "BN": TILE_COLUMNS, "BK": 32 if wide else 64, "BAND": BAND,
        "SOFTCAP": softcap is not None, "num_warps": 8, "num_stages": 2 if wide else 3,
    }  # fmt: skip


def linear_kl(
    hidden_p: Tensor, head_p: Head, hidden_q: Tensor, head_q: Head, direction: str, workspace: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See :class:`kernels.head.Backend`."""
    count, vocabulary, forward = len(hidden_p), len(head_p.weight), direction == "forward"
    kl, lse_p, lse_q = (hidden_p.new_empty(count, dtype=torch.float32) for _ in range(3))
    if count == 0:
        return kl, lse_p, lse_q
    on_hopper = fits_hopper(hidden_p, head_p, hidden_q, head_q)
    tiles = triton.cdiv(vocabulary, HOPPER_COLUMNS if on_hopper else TILE_COLUMNS)
    bytes_per_row = 12 * tiles + 4 + (copied_bytes(hidden_p) + copied_bytes(hidden_q) if on_hopper else 0)
    spans = even_spans(count, max(1, int(workspace) // bytes_per_row))
    part = hidden_p.new_empty(3 * tiles * spans[0].rows.stop, dtype=torch.float32)
    programs = processors(hidden_p.device)
    for span in spans:
        rows = span.rows
        size = rows.stop - rows.start
        temperature = head_p.inverse_temperature[rows].contiguous()
        if on_hopper:
            scan_on_hopper(
                hidden_p[rows], head_p.weight, hidden_q[rows], head_q.weight, temperature, part, programs, forward
            )
        else:
            sides = Side.of(hidden_p[rows], head_p), Side.of(hidden_q[rows], head_q)
            blocks = _blocks(head_p.softcap, *sides)
            scan_pair[(min(triton.cdiv(size, blocks["BM"]) * tiles, 4 * programs),)](
                *sides, temperature, part, head_p.softcap or 0.0, size, vocabulary, hidden_p.shape[1],
                hidden_q.shape[1], BIAS_P=head_p.bias is not None, BIAS_Q=head_q.bias is not None, FORWARD=forward,
                **blocks,
            )  # fmt: skip
        combine_tiles[(triton.cdiv(size, PART_ROWS),)](
            part, kl[rows], lse_p[rows], lse_q[rows], size, tiles, PART_ROWS, PART_TILES, FORWARD=forward
        )
    return kl, lse_p, lse_q


def linear_kl_backward(
    dkl: Tensor,
    kl: Tensor,
    lse_p: Tensor,
    lse_q: Tensor,
    hidden_p: Tensor,
    head_p: Head,
    hidden_q: Tensor,
    head_q: Head,
    direction: str,
    needs: Needs,
    workspace: float,
) -> Gradients:
    """See :class:`kernels.head.Backend`. The host waits once, for the rows that have an upstream gradient."""
    vocabulary, width = head_p.weight.shape
    dtype, softcap = product_dtype(hidden_p.dtype), head_p.softcap
    tiles, pitch = triton.cdiv(vocabulary, TILE_COLUMNS), triton.cdiv(vocabulary, 8) * 8
    # dz, what close_rows reads, and HeadGradients' rows of hidden and of its gradient, in both dtypes.
    bytes_per_row = pitch * dtype.itemsize + 16 * tiles + width * (2 * dtype.itemsize + 2 * hidden_p.dtype.itemsize)
    fixed = 0 if hidden_p.dtype == torch.float32 else CAST_BYTES
    live = dkl.nonzero().squeeze(1)
    spans = even_spans(len(live), max(1, int(workspace - fixed) // bytes_per_row))
    gradients = HeadGradients(hidden_p, head_p, needs, len(spans))
    if len(live) == 0:
        return gradients.finish()
    sides, size = (Side.of(hidden_p, head_p), Side.of(hidden_q, head_q)), spans[0].rows.stop
    blocks = _blocks(softcap, *sides)
    dz = hidden_p.new_empty(size, pitch, dtype=dtype)
    part = hidden_p.new_empty(3 * tiles * size, dtype=torch.float32)
    column = hidden_p.new_empty(tiles * size, dtype=torch.int32)
    temperature = head_p.inverse_temperature.contiguous()
    row_data = dkl.contiguous(), kl, lse_p, lse_q, temperature
    for span in spans:
        rows = live[span.rows]
        count = len(rows)
        pair_gradient[(min(triton.cdiv(count, blocks["BM"]) * tiles, 4 * processors(hidden_p.device)),)](
            *sides, row_data, rows, dz, part, column, softcap or 0.0, count, vocabulary, pitch, width,
            hidden_q.shape[1], BIAS_P=head_p.bias is not None, BIAS_Q=head_q.bias is not None,
            FORWARD=direction == "forward", **blocks,
        )  # fmt: skip
        close_rows[(triton.cdiv(count, PART_ROWS),)](
            lse_p, temperature, rows, dz, part, column, softcap or 0.0, count, vocabulary, tiles, pitch,
            PART_ROWS, PART_TILES, SOFTCAP=softcap is not None,
        )  # fmt: skip
        gradients.add(rows, dz[:count, :vocabulary])
    return gradients.finish()
