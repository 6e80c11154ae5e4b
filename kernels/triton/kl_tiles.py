"""Exact KL divergence of two heads, a tile of both heads' logits at a time: the kernels.

A tile of columns knows no logsumexp of its row, but needs none: with A_t and B_t the tiles' shares of the two
distributions, KL(a‖b) = KL(A‖B) + Σ_t A_t · KL(a‖b within tile t), and no term of that is negative.
"""

import triton
import triton.language as tl

from kernels.triton.divergence import divergence, divergence_terms
from kernels.triton.maths import INTERPRETED, LOG2E, softcapped

LOWEST = tl.constexpr(-1e30)
"""A finite maximum for what is masked out as a whole."""


@triton.jit
def _place(tile, tiles_m, tiles_n, BAND: tl.constexpr):
    """(row, column) of a tile: BAND rows of tiles go through a column before the next, while its weights are in L2."""
    per_band = BAND * tiles_n
    first = tile // per_band * BAND
    size = min(tiles_m - first, BAND)
    return first + tile % per_band % size, tile % per_band // size


@triton.jit
def _capped_logits(
    side, rows, inside, cols, real, softcap, H: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """softcap(hidden·weightᵀ + bias) of a tile, fp32 ``[BM, BN]``."""
    x_ptr, w_ptr, bias_ptr, strides = side
    x_stride_t, x_stride_h, w_stride_v, w_stride_h = strides
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_stride_t
    w_rows = w_ptr + cols.to(tl.int64)[None, :] * w_stride_v
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, H, BK):
        ks = k + tl.arange(0, BK)
        x = tl.load(x_rows + ks.to(tl.int64)[None, :] * x_stride_h, mask=inside[:, None] & (ks < H)[None, :], other=0.0)
        w = tl.load(w_rows + ks.to(tl.int64)[:, None] * w_stride_h, mask=(ks < H)[:, None] & real[None, :], other=0.0)
        if INTERPRETED:  # whose tl.dot multiplies 16-bit operands as raw integers
            x, w = x.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias_ptr + cols, mask=real, other=0.0).to(tl.float32)[None, :]
    if SOFTCAP:
        acc = softcapped(acc, softcap)
    return acc


@triton.jit(do_not_specialize=["T"])
def scan_pair(
    side_p, side_q, temperature_ptr, part_ptr, softcap, T, V, H_P: tl.constexpr, H_Q: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr,
    BIAS_P: tl.constexpr, BIAS_Q: tl.constexpr, SOFTCAP: tl.constexpr, FORWARD: tl.constexpr,
):  # fmt: skip
    """Scan both heads' logits z of a chunk of rows, which never leave the registers.

    A tile of columns n writes log Σ e^z of p and of q, and the divergence of their distributions within the tile, to
    ``part [3, tiles_n, T]`` fp32.

    Args:
        side_p, side_q: a :class:`kernels.triton.kl.Side` each.
        temperature_ptr: fp32 ``[T]``, 1 / temperature.
    """
    tiles_m, tiles_n = tl.cdiv(T, BM), tl.cdiv(V, BN)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        m, n = _place(tile, tiles_m, tiles_n, BAND)
        rows, cols = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN)
        inside, real = rows < T, cols < V
        scale = tl.load(temperature_ptr + rows, mask=inside, other=0.0)[:, None]
        z_p = _capped_logits(side_p, rows, inside, cols, real, softcap, H_P, BM, BN, BK, BIAS_P, SOFTCAP) * scale
        z_q = _capped_logits(side_q, rows, inside, cols, real, softcap, H_Q, BM, BN, BK, BIAS_Q, SOFTCAP) * scale
        z_p, z_q = tl.where(real[None, :], z_p, float("-inf")), tl.where(real[None, :], z_q, float("-inf"))
        max_p, max_q = tl.maximum(tl.max(z_p, 1), LOWEST), tl.maximum(tl.max(z_q, 1), LOWEST)
        u_p, u_q = (z_p - max_p[:, None]) * LOG2E, (z_q - max_q[:, None]) * LOG2E
        u_a, u_b = (u_q, u_p) if FORWARD else (u_p, u_q)
        e_a, e_b, product, excess = divergence_terms(u_a, u_b, True)
        sum_a, sum_b = tl.sum(e_a, 1), tl.sum(e_b, 1)
        within = divergence(sum_a, sum_b, tl.sum(product, 1), tl.sum(excess, 1))
        impossible = (u_b == float("-inf")) & (u_a > float("-inf"))
        within = tl.where(tl.max(impossible.to(tl.int32), 1) != 0, float("inf"), within)
        sum_p, sum_q = (sum_b, sum_a) if FORWARD else (sum_a, sum_b)
        parts, places = tiles_n.to(tl.int64) * T, n.to(tl.int64) * T + rows
        tl.store(part_ptr + places, max_p + tl.log(sum_p), mask=inside)
        tl.store(part_ptr + parts + places, max_q + tl.log(sum_q), mask=inside)
        tl.store(part_ptr + 2 * parts + places, within, mask=inside)


@triton.jit(do_not_specialize=["T", "tiles_n"])
def combine_tiles(
    part_ptr, kl_ptr, lse_p_ptr, lse_q_ptr, T, tiles_n, ROWS: tl.constexpr, TILES: tl.constexpr, FORWARD: tl.constexpr
):
    """From the tiles' ``part [3, tiles_n, T]`` to the rows' KL and logsumexps, fp32 ``[T]`` in nats each."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < T
    parts = tiles_n.to(tl.int64) * T
    a_ptr, b_ptr = (part_ptr + parts, part_ptr) if FORWARD else (part_ptr, part_ptr + parts)
    max_a = tl.full((ROWS,), LOWEST, dtype=tl.float32)
    max_b = max_a
    for first in range(0, tiles_n, TILES):
        tiles = first + tl.arange(0, TILES)
        places = tiles.to(tl.int64)[:, None] * T + rows[None, :]
        mask = (tiles < tiles_n)[:, None] & inside[None, :]
        max_a = tl.maximum(max_a, tl.max(tl.load(a_ptr + places, mask=mask, other=float("-inf")), 0))
        max_b = tl.maximum(max_b, tl.max(tl.load(b_ptr + places, mask=mask, other=float("-inf")), 0))
    sum_a = tl.zeros((ROWS,), dtype=tl.float32)
    sum_b, products, excesses, inner = sum_a, sum_a, sum_a, sum_a
    for first in range(0, tiles_n, TILES):
        tiles = first + tl.arange(0, TILES)
        places = tiles.to(tl.int64)[:, None] * T + rows[None, :]
        mask = (tiles < tiles_n)[:, None] & inside[None, :]
        log_a = tl.load(a_ptr + places, mask=mask, other=float("-inf"))
        log_b = tl.load(b_ptr + places, mask=mask, other=float("-inf"))
        within = tl.load(part_ptr + 2 * parts + places, mask=mask, other=0.0)
        e_a, e_b, product, excess = divergence_terms(
            (log_a - max_a[None, :]) * LOG2E, (log_b - max_b[None, :]) * LOG2E, True
        )
        sum_a += tl.sum(e_a, 0)
        sum_b += tl.sum(e_b, 0)
        products += tl.sum(product, 0)
        excesses += tl.sum(excess, 0)
        # A tile without mass may still hold what b excludes and a does not.
        inner += tl.sum(tl.where(within == float("inf"), within, e_a * within), 0)
    kl = divergence(sum_a, sum_b, products, excesses) + inner / sum_a
    kl = tl.where(inner == float("inf"), inner, tl.where(kl < 0, 0.0, kl))
    lse_a, lse_b = max_a + tl.log(sum_a), max_b + tl.log(sum_b)
    lse_p, lse_q = (lse_b, lse_a) if FORWARD else (lse_a, lse_b)
    tl.store(kl_ptr + rows, kl, mask=inside)
    tl.store(lse_p_ptr + rows, lse_p, mask=inside)
    tl.store(lse_q_ptr + rows, lse_q, mask=inside)


@triton.jit(do_not_specialize=["count"])
def pair_gradient(
    side_p, side_q, row_data, live_ptr, dz_ptr, part_ptr, column_ptr, softcap, count, V, dz_stride,
    H_P: tl.constexpr, H_Q: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr,
    BIAS_P: tl.constexpr, BIAS_Q: tl.constexpr, SOFTCAP: tl.constexpr, FORWARD: tl.constexpr,
):  # fmt: skip
    """The gradient by p's hidden·weightᵀ + bias of the ``count`` rows in ``live``, to ``dz [count, ≥ V]``.

    By the logits z it is g = dkl·p·(log p − log q − KL), or dkl·(p − q) forward. For :func:`close_rows` a tile also
    writes log p of its likeliest token, that token's g and the others' Σ g to ``part [3, tiles_n, count]`` fp32, and
    the token to ``column [tiles_n, count]`` int32.

    Args:
        row_data: dkl, KL, both logsumexps and 1 / temperature, fp32 ``[T]`` each.
        live_ptr: int64 ``[count]``.
    """
    dkl_ptr, kl_ptr, lse_p_ptr, lse_q_ptr, temperature_ptr = row_data
    tiles_m, tiles_n = tl.cdiv(count, BM), tl.cdiv(V, BN)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        m, n = _place(tile, tiles_m, tiles_n, BAND)
        places, cols = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN)
        inside, real = places < count, cols < V
        rows = tl.load(live_ptr + places, mask=inside, other=0)
        scale = tl.load(temperature_ptr + rows, mask=inside, other=0.0)[:, None]
        capped = _capped_logits(side_p, rows, inside, cols, real, softcap, H_P, BM, BN, BK, BIAS_P, SOFTCAP)
        z_q = _capped_logits(side_q, rows, inside, cols, real, softcap, H_Q, BM, BN, BK, BIAS_Q, SOFTCAP) * scale
        log_p = capped * scale - tl.load(lse_p_ptr + rows, mask=inside, other=0.0)[:, None]
        log_p = tl.where(real[None, :], log_p, float("-inf"))
        log_q = z_q - tl.load(lse_q_ptr + rows, mask=inside, other=0.0)[:, None]
        p = tl.exp(log_p)
        if FORWARD:
            g = p - tl.where(real[None, :], tl.exp(log_q), 0.0)
        else:
            kl = tl.load(kl_ptr + rows, mask=inside, other=0.0)[:, None]
            g = tl.where(p == 0, 0.0, p * (log_p - log_q - kl))
        g *= tl.load(dkl_ptr + rows, mask=inside, other=0.0)[:, None]
        likeliest = tl.argmax(log_p, 1)
        at_likeliest = tl.arange(0, BN)[None, :] == likeliest[:, None]
        parts, spots = tiles_n.to(tl.int64) * count, n.to(tl.int64) * count + places
        tl.store(part_ptr + spots, tl.max(log_p, 1), mask=inside)
        tl.store(part_ptr + parts + spots, tl.sum(tl.where(at_likeliest, g, 0.0), 1), mask=inside)
        tl.store(part_ptr + 2 * parts + spots, tl.sum(tl.where(at_likeliest, 0.0, g), 1), mask=inside)
        tl.store(column_ptr + spots, n * BN + likeliest, mask=inside)
        dz = g * scale
        if SOFTCAP:
            dz *= 1.0 - (capped / softcap) * (capped / softcap)
        dz_rows = dz_ptr + places.to(tl.int64)[:, None] * dz_stride
        tl.store(dz_rows + cols[None, :], dz.to(dz_ptr.dtype.element_ty), mask=inside[:, None] & real[None, :])


@triton.jit(do_not_specialize=["count", "tiles_n"])
def close_rows(
    lse_p_ptr, temperature_ptr, live_ptr, dz_ptr, part_ptr, column_ptr, softcap, count, V, tiles_n, dz_stride,
    ROWS: tl.constexpr, TILES: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Write dz of each row's likeliest token again, without its part of the logsumexps' rounding.

    An error of the logsumexps or the KL adds a multiple of p to the row's g, which sum to 0: the multiple is Σ g. It
    matters where p → 1, whose own g is a difference of nearly equal numbers. g − p·Σ g is then the others' −Σ g, which
    has no such trouble. Arguments are those of :func:`pair_gradient`.
    """
    places = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = places < count
    parts = tiles_n.to(tl.int64) * count
    best = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    held = tl.zeros((ROWS,), dtype=tl.float32)
    others = held
    column = tl.zeros((ROWS,), dtype=tl.int32)
    for first in range(0, tiles_n, TILES):
        tiles = first + tl.arange(0, TILES)
        spots = tiles.to(tl.int64)[:, None] * count + places[None, :]
        mask = (tiles < tiles_n)[:, None] & inside[None, :]
        log_p = tl.load(part_ptr + spots, mask=mask, other=float("-inf"))
        top = tl.load(part_ptr + parts + spots, mask=mask, other=0.0)
        columns = tl.load(column_ptr + spots, mask=mask, other=0)
        others += tl.sum(tl.load(part_ptr + 2 * parts + spots, mask=mask, other=0.0), 0)
        at_best = tl.arange(0, TILES)[:, None] == tl.argmax(log_p, 0)[None, :]
        others += tl.sum(tl.where(at_best, 0.0, top), 0)
        new_best, new_held = tl.max(log_p, 0), tl.sum(tl.where(at_best, top, 0.0), 0)
        better = new_best > best
        others += tl.where(better, held, new_held)
        held = tl.where(better, new_held, held)
        column = tl.where(better, tl.sum(tl.where(at_best, columns, 0), 0), column)
        best = tl.where(better, new_best, best)
    rows = tl.load(live_ptr + places, mask=inside, other=0)
    scale = tl.load(temperature_ptr + rows, mask=inside, other=1.0)
    p = tl.exp(best)
    dz = (held * (1.0 - p) - others * p) * scale
    if SOFTCAP:
        capped = (best + tl.load(lse_p_ptr + rows, mask=inside, other=0.0)) / (scale * softcap)
        dz *= 1.0 - capped * capped
    spot = places.to(tl.int64) * dz_stride + column
    tl.store(dz_ptr + spot, dz.to(dz_ptr.dtype.element_ty), mask=inside & (column < V))
