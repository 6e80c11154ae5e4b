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
    accumulators,
    allocate_ring,
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
        cut = max(cut, 1)
        part = (item - whole) // cut
        tile = whole + (item - whole) % cut
        begin = steps * part // parts
        end = steps * (part + 1) // parts
    return tile, begin, end


@gluon.jit
def _producer(
    e_desc, w_descs, ring, plan_ptr, V, H: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    live, whole, parts = gl.load(plan_ptr), gl.load(plan_ptr + 2), gl.load(plan_ptr + 3)
    tiles_m, tiles_n, steps = gl.cdiv(live, ROWS * GROUPS), gl.cdiv(H, BN), gl.cdiv(V, BK)
    cut = tiles_m * tiles_n - whole
    turn = 0
    for item in range(gl.program_id(0), whole + cut * parts, gl.num_programs(0)):
        tile, begin, end = tile_part(item, whole, cut, parts, steps)
        m, n = tile_place(tile, tiles_m, tiles_n, BAND)
        turn = produce(e_desc, w_descs, ring, turn, m, n, begin, end, BN, BK, STAGES, False, True)


@gluon.jit
def _write(acc, col, place, live, H: gl.constexpr, rows_data):
    """The rows of a whole tile, scaled, to where they belong."""
    factor_ptr, source_ptr, dhidden_ptr, _ = rows_data
    layout: gl.constexpr = acc.type.layout
    places = place + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    cols = col + gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    inside = places < live
    factor = gl.load(factor_ptr + places, mask=inside, other=0.0)
    rows = gl.load(source_ptr + places, mask=inside, other=0).to(gl.int64)
    value = (acc * factor[:, None]).to(gl.bfloat16)
    gl.store(dhidden_ptr + rows[:, None] * H + cols[None, :], value, mask=inside[:, None] & (cols < H)[None, :])


@gluon.jit
def _write_part(acc, col, row, BN: gl.constexpr, rows_data):
    """A part of a tile to ``partial``."""
    _, _, _, partial_ptr = rows_data
    layout: gl.constexpr = acc.type.layout
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    cols = col + gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    gl.store(partial_ptr + rows[:, None] * BN + cols[None, :], acc)


@gluon.jit
def _consumer(
    GROUP: gl.constexpr, ring, rows_data, plan_ptr, V, H: gl.constexpr,
    BN: gl.constexpr, TAIL: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    live, whole, parts = gl.load(plan_ptr), gl.load(plan_ptr + 2), gl.load(plan_ptr + 3)
    tiles_m, tiles_n, steps = gl.cdiv(live, ROWS * GROUPS), gl.cdiv(H, BN), gl.cdiv(V, BK)
    cut = tiles_m * tiles_n - whole
    turn = 0
    phase = 0
    tile, begin, end = tile_part(gl.program_id(0), whole, cut, parts, steps)
    m, n = tile_place(tile, tiles_m, tiles_n, BAND)
    for item in range(gl.program_id(0), whole + cut * parts, gl.num_programs(0)):
        accs, turn, phase = consume_tile(
            accumulators(BN, TAIL), ring, turn, phase, begin, end, GROUP, LAG, STAGES, False, True
        )  # fmt: skip
        for i in gl.static_range(len(accs)):
            if item < whole:
                _write(accs[i], n * BN + i * (BN - TAIL), (m * GROUPS + GROUP) * ROWS, live, H, rows_data)
            else:
                slot = (item - whole).to(gl.int64)
                _write_part(accs[i], i * (BN - TAIL), (slot * GROUPS + GROUP) * ROWS, BN, rows_data)
        tile, begin, end = tile_part(item + gl.num_programs(0), whole, cut, parts, steps)
        m, n = tile_place(tile, tiles_m, tiles_n, BAND)


@gluon.jit
def dhidden_product(
    e_desc, w_desc, w_tail_desc, factor_ptr, source_ptr, dhidden_ptr, partial_ptr, plan_ptr, V, H: gl.constexpr,
    BN: gl.constexpr, TAIL: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    """dX[source[i]] = factor[i] · Σ_v E[i, v]·W[v] for the ``plan[0]`` live rows i.

    The tiles past the first ``plan[2]`` are cut into ``plan[3]`` parts along the vocabulary, so that the last round
    fills the chip too; parts go to ``partial [parts · cut tiles, rows of a tile, BN]`` fp32 for
    :func:`kernels.triton.rows.finish_dhidden`.
    """
    e = gl.allocate_shared_memory(gl.bfloat16, [STAGES * GROUPS, ROWS, BK], e_desc.layout)
    full, empty = make_barriers(STAGES, 1), make_barriers(STAGES, GROUPS)
    lead = make_barriers(1, 1)
    fence_async_shared()
    w_descs = (w_desc,)
    if TAIL > 0:
        w_descs = (w_desc, w_tail_desc)
    ring = (e, allocate_ring(w_descs, STAGES), full, empty, lead)
    rows = (factor_ptr, source_ptr, dhidden_ptr, partial_ptr)
    gl.warp_specialize(
        [
            (_consumer, (0, ring, rows, plan_ptr, V, H, BN, TAIL, STAGES, BAND, LAG)),
            (_consumer, (1, ring, rows, plan_ptr, V, H, BN, TAIL, STAGES, BAND, LAG)),
            (_producer, (e_desc, w_descs, ring, plan_ptr, V, H, BN, STAGES, BAND)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
