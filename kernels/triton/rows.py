"""Everything about a chunk's rows between its products: one scalar a row, and which rows take part."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.maths import expm1_negative, softcapped, softplus

ANCHOR_LIMIT = tl.constexpr(40.0)
"""Nats that an anchor may miss the logsumexp by; beyond, small terms underflow and factors leave bf16's range."""

LIVE_BLOCK = tl.constexpr(64)
"""Live rows are filled up to a multiple of this with zeros, the depth of a product's step."""


def aligned(vector: Tensor) -> Tensor:
    """The vector, contiguous and from 16 bytes on: for any other place Triton would compile the kernels again."""
    vector = vector.contiguous()
    return vector if vector.data_ptr() % 16 == 0 else vector.clone()


@triton.jit
def set_anchor(
    x_ptr, w_ptr, bias_ptr, target_ptr, guess_ptr, temperature_ptr, softcap,
    logit_ptr, anchor_ptr, target32_ptr, has_target_ptr, x_stride, w_stride_v, w_stride_h, V, tiles_n,
    H: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, FLAGS: tl.constexpr, GUESS: tl.constexpr,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One row a program: the target's logit, and from it a guess of the logsumexp.

    GUESS: "anchor" (``guess`` is the logsumexp), "logprob" (it is the target's log-probability) or "" (the target's
    logit serves). A guess that is not finite counts as none. The logit of a target that is no column is NaN, and
    nothing is read or written where it points.
    """
    row = tl.program_id(0)
    target = tl.load(target_ptr + row)
    exists = (target >= 0) & (target < V)
    target = tl.where(exists, target, 0)
    total = tl.zeros((BH,), dtype=tl.float32)
    for h in range(0, H, BH):
        hs = h + tl.arange(0, BH)
        x = tl.load(x_ptr + row.to(tl.int64) * x_stride + hs, mask=hs < H, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + target * w_stride_v + hs.to(tl.int64) * w_stride_h, mask=hs < H, other=0.0).to(tl.float32)
        total += x * w
    logit = tl.sum(total, 0)
    if BIAS:
        logit += tl.load(bias_ptr + target).to(tl.float32)
    if SOFTCAP:
        logit = softcapped(logit, softcap)
    logit = tl.where(exists, logit * tl.load(temperature_ptr + row), float("nan"))
    anchor = logit
    if GUESS != "":
        guess = tl.load(guess_ptr + row)
        if GUESS == "logprob":
            guess = logit - guess
        anchor = tl.where(tl.abs(guess) < float("inf"), guess, logit)
    tl.store(logit_ptr + row, logit)
    tl.store(anchor_ptr + row, anchor)
    tl.store(target32_ptr + row, target.to(tl.int32))
    if FLAGS:  # several rows may raise the same flag, all to 1
        one = tl.full((), 1, tl.int8)
        tl.store(has_target_ptr + (row // 64) * tiles_n + target // BN, one)


@triton.jit(do_not_specialize=["T"])
def row_statistics(
    total_ptr, weighted_ptr, logit_ptr, anchor_ptr, valid_ptr, logprob_ptr, entropy_ptr, rest_ptr, log_sum_ptr,
    list_ptr, count_ptr, T, tiles_n, BM: tl.constexpr, BN: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Sum the tiles of each row; with the anchor a, rest = Σ e^(z−a) over all but the target and s that with it::

        logp = −softplus(log rest − (z_y − a))        H = (rest·log s − Σ e·(z−a)) / s − p_y·logp

    Rows whose anchor missed by more than ANCHOR_LIMIT go on ``list`` (in any order), which ``count`` counts. With
    LISTED, the rows on the list are done again.
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    if LISTED:
        inside = rows < tl.load(count_ptr)
        rows = tl.load(list_ptr + rows, mask=inside, other=0)
    else:
        inside = rows < T
    rest = tl.zeros((BM,), dtype=tl.float32)
    weighted = tl.zeros((BM,), dtype=tl.float32)
    for first in range(0, tiles_n, BN):
        tiles = first + tl.arange(0, BN)
        mask = (tiles < tiles_n)[:, None] & inside[None, :]
        place = tiles.to(tl.int64)[:, None] * T + rows[None, :]
        rest += tl.sum(tl.load(total_ptr + place, mask=mask, other=0.0), 0)
        weighted += tl.sum(tl.load(weighted_ptr + place, mask=mask, other=0.0), 0)
    above = tl.load(logit_ptr + rows, mask=inside, other=0.0) - tl.load(anchor_ptr + rows, mask=inside, other=0.0)
    valid = tl.load(valid_ptr + rows, mask=inside, other=0) != 0
    logprob = -softplus(tl.log(rest) - above)
    p = tl.exp(logprob)
    total = rest + tl.exp(above)
    log_sum = tl.log(total)
    entropy = (rest * log_sum - weighted) / total - tl.where(p > 0, p * logprob, 0.0)
    entropy = tl.where(entropy < 0, 0.0, entropy)  # where the anchor is far off, two terms of 40 nats cancel
    tl.store(logprob_ptr + rows, tl.where(valid, logprob, 0.0), mask=inside)
    tl.store(entropy_ptr + rows, tl.where(valid, entropy, 0.0), mask=inside)
    tl.store(rest_ptr + rows, rest, mask=inside)
    tl.store(log_sum_ptr + rows, log_sum, mask=inside)
    if not LISTED:
        missed = inside & valid & ((tl.abs(log_sum) <= ANCHOR_LIMIT) == 0)
        if tl.max(missed.to(tl.int32), 0) > 0:
            places = tl.atomic_add(count_ptr + tl.zeros((BM,), dtype=tl.int32), 1, mask=missed)
            tl.store(list_ptr + places, rows, mask=missed)


@triton.jit(do_not_specialize=["T"])
def reset_anchor(total_ptr, anchor_ptr, list_ptr, count_ptr, T, tiles_n, BM: tl.constexpr, BN: tl.constexpr):
    """The anchor of a listed row becomes its largest logit, whose tiles' maxima are in ``total``."""
    places = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = places < tl.load(count_ptr)
    rows = tl.load(list_ptr + places, mask=inside, other=0)
    largest = tl.full((BM,), float("-inf"), dtype=tl.float32)
    for first in range(0, tiles_n, BN):
        tiles = first + tl.arange(0, BN)
        mask = (tiles < tiles_n)[:, None] & inside[None, :]
        place = tiles.to(tl.int64)[:, None] * T + rows[None, :]
        largest = tl.maximum(largest, tl.max(tl.load(total_ptr + place, mask=mask, other=float("-inf")), 0))
    tl.store(anchor_ptr + rows, largest, mask=inside)


@triton.jit(do_not_specialize=["T", "spare_tiles"])
def plan_rows(
    dlogprob_ptr, dentropy_ptr, source_ptr, hole_ptr, tail_ptr, plan_ptr, T, tiles_h, programs, spare_tiles,
    BLOCK: tl.constexpr, TILE: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """Say which rows are live, how they close up, and how dX's product is cut. One program.

    The live rows are to fill the first places: ``source[i]`` is the row that ends up at place i. Live rows that are
    there stay; ``hole[k]`` is the k-th dead row among the first places and ``tail[k]`` the live row that moves there.
    ``plan`` = (live rows, moves, tiles of dX done whole, parts of each other tile): the last round of tiles is cut
    along the vocabulary so that it fills the chip, into at most ``spare_tiles`` parts in all.
    """
    live_total = tl.zeros((), dtype=tl.int32)
    for first in range(0, T, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        live = tl.load(dlogprob_ptr + rows, mask=rows < T, other=0.0) != 0
        if ENTROPY:
            live |= tl.load(dentropy_ptr + rows, mask=rows < T, other=0.0) != 0
        live_total += tl.sum(live.to(tl.int32), 0)
    holes = tl.zeros((), dtype=tl.int32)
    tails = tl.zeros((), dtype=tl.int32)
    for first in range(0, T, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        live = tl.load(dlogprob_ptr + rows, mask=rows < T, other=0.0) != 0
        if ENTROPY:
            live |= tl.load(dentropy_ptr + rows, mask=rows < T, other=0.0) != 0
        hole = (live == 0) & (rows < live_total)
        tail = live & (rows >= live_total)
        tl.store(source_ptr + rows, rows, mask=live & (rows < live_total))
        tl.store(hole_ptr + holes + tl.cumsum(hole.to(tl.int32), 0) - 1, rows, mask=hole)
        tl.store(tail_ptr + tails + tl.cumsum(tail.to(tl.int32), 0) - 1, rows, mask=tail)
        holes += tl.sum(hole.to(tl.int32), 0)
        tails += tl.sum(tail.to(tl.int32), 0)
    tl.debug_barrier()
    for first in range(0, holes, BLOCK):
        moves = first + tl.arange(0, BLOCK)
        hole = tl.load(hole_ptr + moves, mask=moves < holes, other=0)
        tl.store(source_ptr + hole, tl.load(tail_ptr + moves, mask=moves < holes, other=0), mask=moves < holes)

    tiles = tl.cdiv(live_total, TILE) * tiles_h
    last = tiles % programs
    parts = tl.full((), 1, dtype=tl.int32)
    best = tl.full((), 1.0, dtype=tl.float32)  # rounds the last tiles take
    for candidate in range(2, 17):
        rounds = tl.cdiv(last * candidate, programs).to(tl.float32) / candidate + 0.01 * candidate
        better = (last * candidate <= spare_tiles) & (rounds < best)
        parts = tl.where(better, candidate, parts)
        best = tl.where(better, rounds, best)
    tl.store(plan_ptr, live_total)
    tl.store(plan_ptr + 1, holes)
    tl.store(plan_ptr + 2, tl.where(parts > 1, tiles - last, tiles))
    tl.store(plan_ptr + 3, parts)


@triton.jit
def move_rows(e_ptr, hole_ptr, tail_ptr, plan_ptr, V, e_stride, BLOCK: tl.constexpr):
    """Close E up as planned."""
    moves, blocks = tl.load(plan_ptr + 1), tl.cdiv(V, BLOCK)
    for item in range(tl.program_id(0), moves * blocks, tl.num_programs(0)):
        to = tl.load(hole_ptr + item // blocks).to(tl.int64)
        source = tl.load(tail_ptr + item // blocks).to(tl.int64)
        cols = item % blocks * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(e_ptr + source * e_stride + cols, mask=cols < V)
        tl.store(e_ptr + to * e_stride + cols, value, mask=cols < V)


@triton.jit(do_not_specialize=["T"])
def bind_rows(
    x_ptr, e_ptr, dlogprob_ptr, rest_ptr, log_sum_ptr, temperature_ptr, target_ptr, source_ptr, plan_ptr,
    factor_ptr, scaled_ptr, dhidden_ptr, T, V, x_stride, e_stride, H: tl.constexpr, BH: tl.constexpr,
    RESHAPED: tl.constexpr, SCALE: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """Bring the loss to the rows: dz = −c/s·E, with E = −rest at the target, so that its 1 − p is exact.

    Place i gets factor = −c/(s·temperature) and, with SCALE, the row factor·hidden. With RESHAPED E is dz already
    (:func:`reshape`) and the factor 1. Places past the live rows, up to the next LIVE_BLOCK, are filled with zeros, as
    they may hold anything. With CLEAR every row of dX becomes zero; the live ones are overwritten by the product.
    """
    place = tl.program_id(0)
    live = tl.load(plan_ptr)
    e_row = e_ptr + place.to(tl.int64) * e_stride
    hs = tl.arange(0, BH)
    if place < live:
        row = tl.load(source_ptr + place).to(tl.int64)
        factor = 1.0
        if not RESHAPED:
            factor = -tl.load(dlogprob_ptr + row) * tl.load(temperature_ptr + row) * tl.exp(-tl.load(log_sum_ptr + row))
            rest = tl.load(rest_ptr + row)
            tl.store(e_row + tl.load(target_ptr + row), (-rest).to(e_ptr.dtype.element_ty))
        tl.store(factor_ptr + place, factor)
        if SCALE:
            for h in range(0, H, BH):
                x = tl.load(x_ptr + row * x_stride + h + hs, mask=h + hs < H, other=0.0).to(tl.float32)
                scaled = (x * factor).to(scaled_ptr.dtype.element_ty)
                tl.store(scaled_ptr + place.to(tl.int64) * H + h + hs, scaled, mask=h + hs < H)
    elif place < tl.cdiv(live, LIVE_BLOCK) * LIVE_BLOCK:
        if SCALE:
            for h in range(0, H, BH):
                zero = tl.zeros((BH,), dtype=scaled_ptr.dtype.element_ty)
                tl.store(scaled_ptr + place.to(tl.int64) * H + h + hs, zero, mask=h + hs < H)
        if place < T:
            for v in range(0, V, BH):
                zero = tl.zeros((BH,), dtype=e_ptr.dtype.element_ty)
                tl.store(e_row + v + hs, zero, mask=v + hs < V)
    if CLEAR and place < T:
        for h in range(0, H, BH):
            zero = tl.zeros((BH,), dtype=dhidden_ptr.dtype.element_ty)
            tl.store(dhidden_ptr + place.to(tl.int64) * H + h + hs, zero, mask=h + hs < H)


@triton.jit
def reshape(
    e_ptr, out_ptr, dlogprob_ptr, dentropy_ptr, logprob_ptr, entropy_ptr, log_sum_ptr, anchor_ptr, logit_ptr,
    temperature_ptr, target_ptr, source_ptr, plan_ptr, softcap, V, e_stride, out_stride,
    BLOCK: tl.constexpr, ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Turn E into dz where that is not E's multiple, with entropy's own gradient g or a softcap::

        dz = −p·(c + g·(log p + H)), at the target c·(1 − p) − g·p·(log p + H); times (1 − (z·temperature/cap)²)
        and 1/temperature, with z = anchor + log E.

    One pass over the live rows. E is fp32 here, as the logarithm of a bf16 is off by 0.004;
    the result may be narrower, and starts where E does: it is written behind what has been read.
    """
    live = tl.load(plan_ptr)
    for place in range(tl.program_id(0), live, tl.num_programs(0)):
        row = tl.load(source_ptr + place)
        c, logprob = tl.load(dlogprob_ptr + row), tl.load(logprob_ptr + row)
        log_sum, anchor, logit = tl.load(log_sum_ptr + row), tl.load(anchor_ptr + row), tl.load(logit_ptr + row)
        target = tl.load(target_ptr + row)
        p = tl.exp(logprob)
        target_dz = -c * expm1_negative(logprob)
        g = 0.0
        entropy = 0.0
        if ENTROPY:
            g, entropy = tl.load(dentropy_ptr + row), tl.load(entropy_ptr + row)
            target_dz -= tl.where(p > 0, g * p * (logprob + entropy), 0.0)
        inverse_temperature = tl.load(temperature_ptr + row)
        target_dz *= inverse_temperature
        factor = -inverse_temperature * tl.exp(-log_sum)
        bound = softcap * inverse_temperature
        wide = tl.zeros((), dtype=tl.int64) + place
        e_row, out_row = e_ptr + wide * e_stride, out_ptr + wide * out_stride
        for first in range(0, V, BLOCK):
            cols = first + tl.arange(0, BLOCK)
            e = tl.load(e_row + cols, mask=cols < V, other=0.0)
            log_e = tl.log(tl.maximum(e, 1.2e-38))
            value = tl.where(cols == target, target_dz, e * factor * (c + g * (log_e - log_sum + entropy)))
            if SOFTCAP:
                t = tl.where(cols == target, logit, anchor + log_e) / bound
                value *= 1 - t * t
            tl.debug_barrier()
            tl.store(out_row + cols, value.to(out_ptr.dtype.element_ty), mask=cols < V)


@triton.jit
def finish_dhidden(
    partial_ptr, factor_ptr, source_ptr, dhidden_ptr, plan_ptr, tiles_h, H: tl.constexpr, BAND: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sum the parts of the tiles that the product cut, in order, scale them and put them in their places."""
    live, whole, parts = tl.load(plan_ptr), tl.load(plan_ptr + 2), tl.load(plan_ptr + 3)
    tiles_m = tl.cdiv(live, BM)
    cut = tiles_m * tiles_h - whole
    slabs: tl.constexpr = BM // ROWS
    for item in range(tl.program_id(0), cut * slabs, tl.num_programs(0)):
        tile = whole + item // slabs
        per_band = BAND * tiles_h
        first = tile // per_band * BAND
        size = min(tiles_m - first, BAND)
        m, n = first + tile % per_band % size, tile % per_band // size
        inner = item % slabs * ROWS + tl.arange(0, ROWS)
        columns = tl.arange(0, PADDED)
        places, cols = m * BM + inner, n * BN + columns
        total = tl.zeros((ROWS, PADDED), dtype=tl.float32)
        for part in range(parts):
            slot = (part * cut + item // slabs).to(tl.int64)
            place = (slot * BM + inner[:, None]) * BN + columns[None, :]
            total += tl.load(partial_ptr + place, mask=(columns < BN)[None, :])
        inside = places < live
        factor = tl.load(factor_ptr + places, mask=inside, other=0.0)
        rows = tl.load(source_ptr + places, mask=inside, other=0).to(tl.int64)
        value = (total * factor[:, None]).to(dhidden_ptr.dtype.element_ty)
        tl.store(
            dhidden_ptr + rows[:, None] * H + cols[None, :],
            value,
            mask=inside[:, None] & ((columns < BN) & (cols < H))[None, :],
        )


@triton.jit
def add_dbias(e_ptr, factor_ptr, dbias_ptr, plan_ptr, V, e_stride, BM: tl.constexpr, BN: tl.constexpr):
    """db[v] += Σ_i factor[i]·E[i, v] over the live rows, in order."""
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    live = tl.load(plan_ptr)
    total = tl.zeros((BN,), dtype=tl.float32)
    for first in range(0, live, BM):
        places = first + tl.arange(0, BM)
        inside = places < live
        factor = tl.load(factor_ptr + places, mask=inside, other=0.0)
        mask = inside[:, None] & (cols < V)[None, :]
        e = tl.load(e_ptr + places.to(tl.int64)[:, None] * e_stride + cols[None, :], mask=mask, other=0.0)
        total += tl.sum(e.to(tl.float32) * factor[:, None], 0)
    before = tl.load(dbias_ptr + cols, mask=cols < V, other=0.0)
    tl.store(dbias_ptr + cols, before + total, mask=cols < V)
