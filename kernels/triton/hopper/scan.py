"""Hopper scan: E = exp(z − anchor) of a chunk and its row sums, in about the time of the bare product."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from kernels.triton.hopper.mainloop import (
    CONSUMER_REGISTERS,
    GROUPS,
    PRODUCER_REGISTERS,
    ROWS,
    accumulator,
    allocate_ring,
    consume_tile,
    make_barriers,
    produce,
    tile_place,
)
from kernels.triton.maths import LN2, LOG2E, softcapped


@gluon.jit
def _producer(
    x_desc, w_desc, ring, T, V, H: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = gl.cdiv(T, ROWS * GROUPS), gl.cdiv(V, BN)
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = tile_place(tile, tiles_m, tiles_n, BAND)
        turn = produce(
            x_desc, (w_desc,), ring, turn, m, n, 0, gl.cdiv(H, BK), BN, BK, STAGES, False, False
        )  # fmt: skip


@gluon.jit
def _consumer(
    GROUP: gl.constexpr, ring, rows_data, output, T, V, H: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr, LAG: gl.constexpr,
    BUFFERS: gl.constexpr, BIAS: gl.constexpr, SOFTCAP: gl.constexpr, STORE: gl.constexpr,
):  # fmt: skip
    temperature_ptr, anchor_ptr, target_ptr, bias_ptr, has_target_ptr, total_ptr, weighted_ptr, softcap = rows_data
    e_desc, e_halves, e_ptr, e_stride = output
    tiles_m, tiles_n = gl.cdiv(T, ROWS * GROUPS), gl.cdiv(V, BN)
    layout: gl.constexpr = accumulator(BN).type.layout
    turn = 0
    phase = 0
    m, n = tile_place(gl.program_id(0), tiles_m, tiles_n, BAND)
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        first_row = (m * GROUPS + GROUP) * ROWS
        rows = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        inside = rows < T
        scale = gl.load(temperature_ptr + rows, mask=inside, other=0.0) * LOG2E
        anchor = gl.load(anchor_ptr + rows, mask=inside, other=0.0) * LOG2E
        masked = gl.load(has_target_ptr + (m * GROUPS + GROUP) * tiles_n + n) | ((n + 1) * BN > V).to(gl.int8)

        accs, turn, phase = consume_tile(
            (accumulator(BN),), ring, turn, phase, 0, gl.cdiv(H, BK), GROUP, LAG, STAGES, False, False
        )  # fmt: skip
        acc = accs[0]

        cols = gl.arange(0, BN, gl.SliceLayout(0, layout))
        if BIAS:
            bias = gl.load(bias_ptr + n * BN + cols, mask=cols < V - n * BN, other=0.0).to(gl.float32)
            acc += bias[None, :]
        if SOFTCAP:
            acc = softcapped(acc, softcap)
        u = acc * scale[:, None] - anchor[:, None]
        if masked != 0:
            # Columns past the vocabulary add nothing, and neither does the target: what is left must not cancel.
            target = gl.load(target_ptr + rows, mask=inside, other=-1) - n * BN
            u = gl.where((cols < V - n * BN)[None, :] & (cols[None, :] != target[:, None]), u, -1e30)
        e = gl.exp2(u)
        total = gl.sum(e, 1)
        if BIAS:
            u = gl.maximum(u, -150.0)  # 0·(−inf) is 0 here
        weighted = gl.sum(e * u, 1) * LN2
        if STORE == "bf16":
            halves = e.to(gl.bfloat16).reshape((ROWS, 2, BN // 2)).permute((0, 2, 1)).split()
            for half in gl.static_range(2):
                if half % BUFFERS == 0:
                    tma.store_wait(0)
                e_half = e_halves.index(GROUP * BUFFERS + half % BUFFERS)
                e_half.store(halves[half])
                fence_async_shared()
                tma.async_copy_shared_to_global(e_desc, [first_row, n * BN + half * (BN // 2)], e_half)
        if STORE == "fp32":
            place = rows.to(gl.int64)[:, None] * e_stride + n * BN + cols[None, :]
            gl.store(e_ptr + place, e, mask=inside[:, None] & (cols < V - n * BN)[None, :])
        gl.store(total_ptr + n * T + rows, total, mask=inside)
        gl.store(weighted_ptr + n * T + rows, weighted, mask=inside)
        m, n = tile_place(tile + gl.num_programs(0), tiles_m, tiles_n, BAND)
    if STORE == "bf16":
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["T"])
def anchored_scan(
    x_desc, w_desc, e_desc, e_ptr, e_stride,
    temperature_ptr, anchor_ptr, target_ptr, bias_ptr, has_target_ptr, total_ptr, weighted_ptr,
    softcap, T, V, H: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
    LAG: gl.constexpr, BUFFERS: gl.constexpr,
    BIAS: gl.constexpr, SOFTCAP: gl.constexpr, STORE: gl.constexpr,
):  # fmt: skip
    """:func:`kernels.triton.scan.anchored_scan` for bf16, with ``has_target [row blocks of 64, tiles_n]`` int8.

    STORE: E goes nowhere (""), to ``e_desc`` ("bf16") or to ``e_ptr`` ("fp32").
    """
    x = gl.allocate_shared_memory(gl.bfloat16, [STAGES * GROUPS, ROWS, BK], x_desc.layout)
    e = x  # not used, unless
    if STORE == "bf16":
        e = gl.allocate_shared_memory(gl.bfloat16, [GROUPS * BUFFERS, ROWS, BN // 2], e_desc.layout)
    full, empty = make_barriers(STAGES, 1), make_barriers(STAGES, GROUPS)
    lead = make_barriers(1, 1)
    fence_async_shared()
    ring = (x, allocate_ring((w_desc,), STAGES), full, empty, lead)
    output = (e_desc, e, e_ptr, e_stride)
    rows = (temperature_ptr, anchor_ptr, target_ptr, bias_ptr, has_target_ptr, total_ptr, weighted_ptr, softcap)
    gl.warp_specialize(
        [
            (
                _consumer,
                (0, ring, rows, output, T, V, H, BN, BK, STAGES, BAND, LAG, BUFFERS, BIAS, SOFTCAP, STORE),
            ),
            (
                _consumer,
                (1, ring, rows, output, T, V, H, BN, BK, STAGES, BAND, LAG, BUFFERS, BIAS, SOFTCAP, STORE),
            ),
            (_producer, (x_desc, w_desc, ring, T, V, H, BN, BK, STAGES, BAND)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
