"""The portable scan: E = exp(z − anchor) and its row sums, or a row's largest logit, a tile of logits at a time."""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.triton.maths import INTERPRETED, LOG2E, softcapped


@triton.jit(do_not_specialize=["T"])
def anchored_scan(
    x_ptr, w_ptr, e_ptr, temperature_ptr, anchor_ptr, target_ptr, bias_ptr, total_ptr, weighted_ptr,
    list_ptr, count_ptr, softcap, T, V, x_stride, w_stride_v, w_stride_h, e_stride, H: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    LISTED: tl.constexpr, MAXIMUM: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Scan the logits z of a chunk of rows, which never leave the registers.

    With u = z − anchor and e = exp(u), the target's column left out, a tile of columns n writes Σ e to
    ``total [tiles_n, T]``, Σ e·u to ``weighted`` and, with STORE, e itself to ``e [T, ≥ V]``. With MAXIMUM it writes
    the largest z, the target's too, to ``total`` and nothing else. With LISTED only the ``count`` rows in ``list`` are
    looked at; their results go where they would have gone.

    Args:
        x_ptr, w_ptr: hidden ``[T, H]`` with contiguous rows, weight ``[V, H]`` with any strides.
        temperature_ptr: fp32 ``[T]``, 1 / temperature.
        anchor_ptr: fp32 ``[T]``.
        target_ptr: int32 ``[T]``.
    """
    rows_total = T
    if LISTED:
        rows_total = tl.load(count_ptr)
    tiles_m, tiles_n = tl.cdiv(rows_total, BM), tl.cdiv(V, BN)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        m, n = tile // tiles_n, tile % tiles_n
        rows = m * BM + tl.arange(0, BM)
        inside = rows < rows_total
        if LISTED:
            rows = tl.load(list_ptr + rows, mask=inside, other=0)
        cols = n * BN + tl.arange(0, BN)
        real = cols < V
        x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_stride
        w_rows = w_ptr + cols.to(tl.int64)[None, :] * w_stride_v
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(0, H, BK):
            ks = k + tl.arange(0, BK)
            x = tl.load(x_rows + ks[None, :], mask=inside[:, None] & (ks < H)[None, :], other=0.0)
            w = tl.load(
                w_rows + ks.to(tl.int64)[:, None] * w_stride_h, mask=(ks < H)[:, None] & real[None, :], other=0.0
            )
            if INTERPRETED:  # whose tl.dot multiplies 16-bit operands as raw integers
                x, w = x.to(tl.float32), w.to(tl.float32)
            acc = tl.dot(x, w, acc, input_precision="ieee")
        if BIAS:
            acc += tl.load(bias_ptr + cols, mask=real, other=0.0).to(tl.float32)[None, :]
        if SOFTCAP:
            acc = softcapped(acc, softcap)
        z = acc * tl.load(temperature_ptr + rows, mask=inside, other=0.0)[:, None]
        if MAXIMUM:
            largest = tl.max(tl.where(real[None, :], z, float("-inf")), 1)
            tl.store(total_ptr + n * T + rows, largest, mask=inside)
        else:
            anchor = tl.load(anchor_ptr + rows, mask=inside, other=0.0)
            target = tl.load(target_ptr + rows, mask=inside, other=-1)
            # Columns past the vocabulary add nothing, and neither does the target: what is left must not cancel.
            counted = real[None, :] & (cols[None, :] != target[:, None])
            u = z - anchor[:, None]
            e = tl.where(counted, tl.exp2(u * LOG2E), 0.0)
            tl.store(total_ptr + n * T + rows, tl.sum(e, 1), mask=inside)
            # 0·(−inf) is 0 here.
            tl.store(weighted_ptr + n * T + rows, tl.sum(e * tl.maximum(u, -105.0), 1), mask=inside)
            if STORE:
                e_rows = e_ptr + rows.to(tl.int64)[:, None] * e_stride
                tl.store(e_rows + cols[None, :], e.to(e_ptr.dtype.element_ty), mask=inside[:, None] & real[None, :])


def _fitting(configs: list[triton.Config], arguments: dict[str, Any], **_: Any) -> list[triton.Config]:
    """fp32 operands are multiplied without tensor cores, in smaller steps."""
    depth = 32 if arguments["x_ptr"].dtype == torch.float32 else 64
    return [config for config in configs if config.kwargs["BK"] == depth]


tuned_scan = triton.autotune(
    [
        triton.Config({"BM": 128, "BK": 64}, num_warps=8, num_stages=3),
        triton.Config({"BM": 128, "BK": 64}, num_warps=4, num_stages=3),
        triton.Config({"BM": 64, "BK": 64}, num_warps=4, num_stages=4),
        triton.Config({"BM": 128, "BK": 32}, num_warps=8, num_stages=2),
        triton.Config({"BM": 64, "BK": 32}, num_warps=4, num_stages=2),
    ],
    key=["H", "V", "STORE"],
    prune_configs_by={"early_config_prune": _fitting},
    cache_results=True,
)(anchored_scan)
"""``anchored_scan`` in the tiles that were fastest on this GPU: timed at the first call, remembered on disk."""
