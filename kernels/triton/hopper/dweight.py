"""Hopper product for dW: the transpose of E times the scaled rows of hidden, summed over chunks."""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from kernels.triton.hopper.mainloop import (
    BK,
    CONSUMER_REGISTERS,
    GROUPS,
    PRODUCER_REGISTERS,
    ROWS,
    accumulators,
    allocate_ring,
    column_parts,
    consume_tile,
    make_barriers,
    produce,
    tile_place,
)


@builtin
def add_shared_to_global(tensor_desc, place, source, _semantic=None):
    """``tma.async_copy_shared_to_global`` that adds in memory; Gluon has no name for it."""
    place = _semantic._convert_to_ir_values(place, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, place, source.handle)


@gluon.jit
def _producer(
    e_desc, x_descs, ring, plan_ptr, V, H: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    steps = gl.cdiv(gl.load(plan_ptr), BK)
    tiles_m, tiles_n = gl.cdiv(V, ROWS * GROUPS), gl.cdiv(H, BN)
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = tile_place(tile, tiles_m, tiles_n, BAND)
        turn = produce(e_desc, x_descs, ring, turn, m, n, 0, steps, BN, BK, STAGES, True, True)


@gluon.jit
def _load(like, out_ptr, row, col, V, H: gl.constexpr):
    """What is in ``out`` at a tile's place."""
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, like.type.layout))
    cols = col + gl.arange(0, like.shape[1], gl.SliceLayout(0, like.type.layout))
    inside = (rows < V)[:, None] & (cols < H)[None, :]
    return gl.load(out_ptr + rows.to(gl.int64)[:, None] * H + cols[None, :], mask=inside, other=0.0)


@gluon.jit
def _store(acc, out_desc, staged, first, row, col, BUFFERS: gl.constexpr, ADD: gl.constexpr):
    """A tile's columns to ``out`` in boxes, or added to it there."""
    PARTS: gl.constexpr = acc.shape[1] // out_desc.block_shape[1]
    parts = column_parts(acc, PARTS)
    for i in gl.static_range(PARTS):
        if i % BUFFERS == 0:
            tma.store_wait(0)
        part = staged.index(first + i % BUFFERS)
        part.store(parts[i].to(out_desc.dtype))
        fence_async_shared()
        place = [row, col + i * out_desc.block_shape[1]]
        if ADD:
            add_shared_to_global(out_desc, place, part)
        else:
            tma.async_copy_shared_to_global(out_desc, place, part)


@gluon.jit
def _consumer(
    GROUP: gl.constexpr, ring, out, plan_ptr, V, H: gl.constexpr,
    BN: gl.constexpr, TAIL: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr, LAG: gl.constexpr,
    BUFFERS: gl.constexpr, ADDS: gl.constexpr,
):  # fmt: skip
    out_ptr, out_desc, staged = out
    steps = gl.cdiv(gl.load(plan_ptr), BK)
    tiles_m, tiles_n = gl.cdiv(V, ROWS * GROUPS), gl.cdiv(H, BN)
    turn = 0
    phase = 0
    m, n = tile_place(gl.program_id(0), tiles_m, tiles_n, BAND)
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, col = (m * GROUPS + GROUP) * ROWS, n * BN
        accs = accumulators(BN, TAIL)
        if ADDS == "here":
            # Long before it is needed: it waits in registers.
            before = ()
            for i in gl.static_range(len(accs)):
                before = before + (_load(accs[i], out_ptr, row, col + i * (BN - TAIL), V, H),)
        accs, turn, phase = consume_tile(accs, ring, turn, phase, 0, steps, GROUP, LAG, STAGES, True, True)
        for i in gl.static_range(len(accs)):
            acc = accs[i]
            if ADDS == "here":
                acc += before[i].to(gl.float32)
            _store(acc, out_desc, staged, GROUP * BUFFERS, row, col + i * (BN - TAIL), BUFFERS, ADDS == "in memory")
        m, n = tile_place(tile + gl.num_programs(0), tiles_m, tiles_n, BAND)
    tma.store_wait(0)


@gluon.jit
def dweight_product(
    e_desc, x_desc, x_tail_desc, out_ptr, out_desc, plan_ptr, V, H: gl.constexpr,
    BN: gl.constexpr, TAIL: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr, LAG: gl.constexpr,
    BUFFERS: gl.constexpr, ADDS: gl.constexpr,
):  # fmt: skip
    """Σ_i E[i, v]·X[i] over the ``plan[0]`` live rows i, for every v, to ``out [V, H]`` (bf16 or fp32).

    ADDS: to nothing (""), to what was there, read before and rounded once ("here"), or "in memory", where an fp32
    ``out`` loses nothing; each element is added to once a launch, so that the order is fixed. E and X hold numbers up
    to the next 64 rows.
    """
    e = gl.allocate_shared_memory(gl.bfloat16, [STAGES * GROUPS, BK, ROWS], e_desc.layout)
    staged = gl.allocate_shared_memory(
        out_desc.dtype, [GROUPS * BUFFERS, ROWS, out_desc.block_shape[1]], out_desc.layout
    )
    full, empty = make_barriers(STAGES, 1), make_barriers(STAGES, GROUPS)
    lead = make_barriers(1, 1)
    fence_async_shared()
    x_descs = (x_desc,)
    if TAIL > 0:
        x_descs = (x_desc, x_tail_desc)
    ring = (e, allocate_ring(x_descs, STAGES), full, empty, lead)
    out = (out_ptr, out_desc, staged)
    gl.warp_specialize(
        [
            (_consumer, (0, ring, out, plan_ptr, V, H, BN, TAIL, STAGES, BAND, LAG, BUFFERS, ADDS)),
            (_consumer, (1, ring, out, plan_ptr, V, H, BN, TAIL, STAGES, BAND, LAG, BUFFERS, ADDS)),
            (_producer, (e_desc, x_descs, ring, plan_ptr, V, H, BN, STAGES, BAND)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
