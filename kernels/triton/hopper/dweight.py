"""Hopper product for dW: the transpose of E times the scaled rows of hidden, summed over chunks."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from kernels.triton.hopper.mainloop import (
    BK,
    CONSUMER_REGISTERS,
    GROUPS,
    PRODUCER_REGISTERS,
    ROWS,
    consume_tile,
    make_barriers,
    produce,
    tile_place,
)


@gluon.jit
def prefetch_l2(pointers):
    """Ask for the cache lines at ``pointers`` without waiting for them."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _producer(
    e_desc, x_desc, ring, plan_ptr, V, H: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    steps = gl.cdiv(gl.load(plan_ptr), BK)
    tiles_m, tiles_n = gl.cdiv(V, ROWS * GROUPS), gl.cdiv(H, BN)
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = tile_place(tile, tiles_m, tiles_n, BAND)
        turn = produce(e_desc, x_desc, ring, turn, m, n, 0, steps, BN, BK, STAGES, True, True)


@gluon.jit
def _consumer(
    GROUP: gl.constexpr, ring, sums, dw_desc, dw_halves, plan_ptr, V, H: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr, LAG: gl.constexpr, BUFFERS: gl.constexpr,
    BEFORE: gl.constexpr, AFTER: gl.constexpr,
):  # fmt: skip
    dw_ptr, sum_ptr = sums
    steps = gl.cdiv(gl.load(plan_ptr), BK)
    tiles_m, tiles_n = gl.cdiv(V, ROWS * GROUPS), gl.cdiv(H, BN)
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    turn = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = tile_place(tile, tiles_m, tiles_n, BAND)
        row, col = (m * GROUPS + GROUP) * ROWS, n * BN
        if BEFORE != "":
            # So that the sum so far comes from L2 when the tile is done.
            LINE: gl.constexpr = 64 if BEFORE == "bf16" else 32
            before_ptr = dw_ptr if BEFORE == "bf16" else sum_ptr
            lines = gl.arange(0, ROWS * BN // LINE, gl.BlockedLayout([1], [32], [4], [0]))
            line_row, line_col = row + lines // (BN // LINE), col + lines % (BN // LINE) * LINE
            inside = (line_row < V) & (line_col < H)
            prefetch_l2(before_ptr + gl.where(inside, line_row.to(gl.int64) * H + line_col, 0))
        acc = gl.zeros((ROWS, BN), gl.float32, layout)
        acc, turn, phase = consume_tile(
            acc, ring, turn, phase, 0, steps, GROUP, LAG, STAGES, True, True
        )  # fmt: skip
        rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        cols = col + gl.arange(0, BN, gl.SliceLayout(0, layout))
        place = rows.to(gl.int64)[:, None] * H + cols[None, :]
        inside = (rows < V)[:, None] & (cols < H)[None, :]
        if BEFORE == "bf16":
            acc += gl.load(dw_ptr + place, mask=inside, other=0.0).to(gl.float32)
        if BEFORE == "fp32":
            acc += gl.load(sum_ptr + place, mask=inside, other=0.0)
        if AFTER == "fp32":
            gl.store(sum_ptr + place, acc, mask=inside)
        else:
            halves = acc.to(gl.bfloat16).reshape((ROWS, 2, BN // 2)).permute((0, 2, 1)).split()
            for half in gl.static_range(2):
                if half % BUFFERS == 0:
                    tma.store_wait(0)
                dw_half = dw_halves.index(GROUP * BUFFERS + half % BUFFERS)
                dw_half.store(halves[half])
                fence_async_shared()
                tma.async_copy_shared_to_global(dw_desc, [row, col + half * (BN // 2)], dw_half)
    tma.store_wait(0)


@gluon.jit
def dweight_product(
    e_desc, x_desc, dw_ptr, sum_ptr, dw_desc, plan_ptr, V, H: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr, LAG: gl.constexpr, BUFFERS: gl.constexpr,
    BEFORE: gl.constexpr, AFTER: gl.constexpr,
):  # fmt: skip
    """Σ_i E[i, v]·X[i] over the ``plan[0]`` live rows i, for every v; E and X hold numbers up to the next 64.

    Added to nothing (BEFORE ""), to dW ("bf16") or to ``sum`` ("fp32"), both ``[V, H]``, and written to dW or ``sum``
    (AFTER). The sum over many chunks stays in fp32 until the last.
    """
    e = gl.allocate_shared_memory(gl.bfloat16, [STAGES * GROUPS, BK, ROWS], e_desc.layout)
    x = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BK, BN], x_desc.layout)
    dw = gl.allocate_shared_memory(gl.bfloat16, [GROUPS * BUFFERS, ROWS, BN // 2], dw_desc.layout)
    full, empty = make_barriers(STAGES, 1), make_barriers(STAGES, GROUPS)
    lead = make_barriers(1, 1)
    fence_async_shared()
    ring = (e, x, full, empty, lead)
    sums = (dw_ptr, sum_ptr)
    gl.warp_specialize(
        [
            (_consumer, (0, ring, sums, dw_desc, dw, plan_ptr, V, H, BN, STAGES, BAND, LAG, BUFFERS, BEFORE, AFTER)),
            (_consumer, (1, ring, sums, dw_desc, dw, plan_ptr, V, H, BN, STAGES, BAND, LAG, BUFFERS, BEFORE, AFTER)),
            (_producer, (e_desc, x_desc, ring, plan_ptr, V, H, BN, STAGES, BAND)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
