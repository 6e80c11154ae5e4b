"""Hopper product for dX: rows of E times the weight, each row scaled, at its place in dX."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

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
def tile_part(item, whole, cut, parts, steps):
    """(tile, first step, end of steps) of a work item: the whole tiles first, then all first parts, and so on."""
    tile = item
    begin = 0
    end = steps
    if item >= whole:
        part = (item - whole) // cut
        tile = whole + (item - whole) % cut
        begin = steps * part // parts
        end = steps * (part + 1) // parts
    return tile, begin, end


@gluon.jit
def _producer(
    e_desc, w_desc, ring, plan_ptr, V, H: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    live, whole, parts = gl.load(plan_ptr), gl.load(plan_ptr + 2), gl.load(plan_ptr + 3)
    tiles_m, tiles_n, steps = gl.cdiv(live, ROWS * GROUPS), gl.cdiv(H, BN), gl.cdiv(V, BK)
    cut = tiles_m * tiles_n - whole
    turn = 0
    for item in range(gl.program_id(0), whole + cut * parts, gl.num_programs(0)):
        tile, begin, end = tile_part(item, whole, cut, parts, steps)
        m, n = tile_place(tile, tiles_m, tiles_n, BAND)
        turn = produce(e_desc, w_desc, ring, turn, m, n, begin, end, BN, BK, STAGES, False, True)


@gluon.jit
def _consumer(
    GROUP: gl.constexpr, ring, rows_data, plan_ptr, V, H: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    factor_ptr, source_ptr, dhidden_ptr, partial_ptr = rows_data
    live, whole, parts = gl.load(plan_ptr), gl.load(plan_ptr + 2), gl.load(plan_ptr + 3)
    tiles_m, tiles_n, steps = gl.cdiv(live, ROWS * GROUPS), gl.cdiv(H, BN), gl.cdiv(V, BK)
    cut = tiles_m * tiles_n - whole
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    turn = 0
    phase = 0
    for item in range(gl.program_id(0), whole + cut * parts, gl.num_programs(0)):
        tile, begin, end = tile_part(item, whole, cut, parts, steps)
        m, n = tile_place(tile, tiles_m, tiles_n, BAND)
        acc = gl.zeros((ROWS, BN), gl.float32, layout)
        acc, turn, phase = consume_tile(
            acc, ring, turn, phase, begin, end, GROUP, LAG, STAGES, False, True
        )  # fmt: skip
        inner = GROUP * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        cols = gl.arange(0, BN, gl.SliceLayout(0, layout))
        if item < whole:
            places = m * (ROWS * GROUPS) + inner
            inside = places < live
            factor = gl.load(factor_ptr + places, mask=inside, other=0.0)
            rows = gl.load(source_ptr + places, mask=inside, other=0).to(gl.int64)
            value = (acc * factor[:, None]).to(gl.bfloat16)
            mask = inside[:, None] & (n * BN + cols < H)[None, :]
            gl.store(dhidden_ptr + rows[:, None] * H + n * BN + cols[None, :], value, mask=mask)
        else:
            slot = (item - whole).to(gl.int64)
            gl.store(partial_ptr + (slot * (ROWS * GROUPS) + inner[:, None]) * BN + cols[None, :], acc)


@gluon.jit
def dhidden_product(
    e_desc, w_desc, factor_ptr, source_ptr, dhidden_ptr, partial_ptr, plan_ptr, V, H: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    """dX[source[i]] = factor[i] · Σ_v E[i, v]·W[v] for the ``plan[0]`` live rows i.

    The tiles past the first ``plan[2]`` are cut into ``plan[3]`` parts along the vocabulary, so that the last round
    fills the chip too; parts go to ``partial [parts · cut tiles, rows of a tile, BN]`` fp32 for
    :func:`kernels.triton.rows.finish_dhidden`.
    """
    e = gl.allocate_shared_memory(gl.bfloat16, [STAGES * GROUPS, ROWS, BK], e_desc.layout)
    w = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BK, BN], w_desc.layout)
    full, empty = make_barriers(STAGES, 1), make_barriers(STAGES, GROUPS)
    lead = make_barriers(1, 1)
    fence_async_shared()
    ring = (e, w, full, empty, lead)
    rows = (factor_ptr, source_ptr, dhidden_ptr, partial_ptr)
    gl.warp_specialize(
        [
            (_consumer, (0, ring, rows, plan_ptr, V, H, BN, STAGES, BAND, LAG)),
            (_consumer, (1, ring, rows, plan_ptr, V, H, BN, STAGES, BAND, LAG)),
            (_producer, (e_desc, w_desc, ring, plan_ptr, V, H, BN, STAGES, BAND)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
