"""What the Hopper products share: one producer warp and two consumer warpgroups around a ring of tiles.

A program works on output tiles of 128 × BN. Its producer warp copies 128 × 64 of A and 64 × BN of B into the ring with
the bulk tensor copy engine, as far ahead as the ring is long; each consumer warpgroup multiplies 64 of A's rows with
all of B into 64 × BN fp32 registers. Nothing but the ring's barriers joins the warpgroups, so that one can be in its
epilogue while the other keeps the tensor cores busy: the second starts each tile LAG steps behind the first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

ROWS = gl.constexpr(64)
"""Rows of a tile that one warpgroup works on."""
GROUPS = gl.constexpr(2)
"""Warpgroups that multiply. (A third would cut the traffic from L2 by a fifth, but ptxas gives it 128 registers.)"""
BK = gl.constexpr(64)
"""Depth of a step, where a kernel has no other."""
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)


@gluon.jit
def tile_place(tile, tiles_m, tiles_n, BAND: gl.constexpr):
    """(row, column) of a tile: BAND rows of tiles go through a column before the next, while its B is in L2.

    Divisions take long to answer: consumers ask for the next tile's place in the epilogue of the one before, where
    exponentials and stores hide them. Past the last tile the place means nothing.
    """
    per_band = BAND * tiles_n
    first = tile // per_band * BAND
    size = max(min(tiles_m - first, BAND), 1)
    return first + tile % per_band % size, tile % per_band // size


@gluon.jit
def accumulator(COLUMNS: gl.constexpr):
    """Zeros in the registers of a warpgroup, as its products leave them."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    return gl.zeros((ROWS, COLUMNS), gl.float32, layout)


@gluon.jit
def accumulators(BN: gl.constexpr, TAIL: gl.constexpr):
    """A tile's columns in one accumulator or two, the last TAIL apart: 192 are no power of two."""
    accs = (accumulator(BN - TAIL),)
    if TAIL > 0:
        accs = accs + (accumulator(TAIL),)
    return accs


@gluon.jit
def allocate_ring(descs, STAGES: gl.constexpr):
    """The ring's room for B: a buffer for each descriptor's boxes."""
    buffers = ()
    for i in gl.static_range(len(descs)):
        buffers = buffers + (
            gl.allocate_shared_memory(
                gl.bfloat16, [STAGES, descs[i].block_shape[0], descs[i].block_shape[1]], descs[i].layout
            ),
        )
    return buffers


@gluon.jit
def column_parts(x, COUNT: gl.constexpr):
    """The columns of ``x [ROWS, N]`` in so many equal parts, a power of two."""
    if COUNT == 1:
        parts = (x,)
    else:
        low, high = x.reshape((ROWS, 2, x.shape[1] // 2)).permute((0, 2, 1)).split()
        parts = column_parts(low, COUNT // 2) + column_parts(high, COUNT // 2)
    return parts


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers that each wait for ARRIVALS."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def produce(
    a_desc, b_descs, ring, turn, m, n, begin, end,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, A_BY_K: gl.constexpr, B_BY_K: gl.constexpr,
):  # fmt: skip
    """Copy the steps ``begin`` to ``end`` of a tile into the ring; ``turn`` counts steps since the kernel began.

    A_BY_K: A is stored [K, M] rather than [M, K]. B_BY_K: B is stored [K, N] rather than [N, K].
    """
    a, b, full, empty, _ = ring
    for step in range(begin, end):
        stage = turn % STAGES
        mbarrier.wait(empty.index(stage), (turn // STAGES + 1) & 1)
        mbarrier.expect(full.index(stage), (ROWS * GROUPS + BN) * BK * 2)
        k = step * BK
        for group in gl.static_range(GROUPS):
            row = (m * GROUPS + group) * ROWS
            place = [k, row] if A_BY_K else [row, k]
            tma.async_copy_global_to_shared(a_desc, place, full.index(stage), a.index(stage * GROUPS + group))
        column = n * BN
        for i in gl.static_range(len(b_descs)):
            place_b = [k, column] if B_BY_K else [column, k]
            tma.async_copy_global_to_shared(b_descs[i], place_b, full.index(stage), b[i].index(stage))
            column += b_descs[i].block_shape[1 if B_BY_K else 0]
        turn += 1
    return turn


@gluon.jit
def _wait(accs, STEPS: gl.constexpr):
    """Until the products of no more than so many steps are in flight."""
    if len(accs) == 1:
        done = (warpgroup_mma_wait(num_outstanding=STEPS, deps=accs),)
    else:
        done = warpgroup_mma_wait(num_outstanding=STEPS * len(accs), deps=accs)
    return done


@gluon.jit
def consume_tile(
    accs, ring, turn, phase, begin, end,
    GROUP: gl.constexpr, LAG: gl.constexpr, STAGES: gl.constexpr,
    A_BY_K: gl.constexpr, B_BY_K: gl.constexpr,
):  # fmt: skip
    """Multiply the steps ``begin`` to ``end`` of a tile into ``accs``. Gives ``accs, turn, phase``.

    One step's product stays in flight: a stage is given back when the next one's product has been issued. The second
    warpgroup starts when the first has issued LAG steps.
    """
    a, b, full, empty, lead = ring
    # In a tile shorter than that, the ring would let a warpgroup signal twice before the next has seen the first.
    leads = (end - begin >= LAG) & (end - begin + LAG > STAGES)
    if leads:
        if GROUP == 1:
            mbarrier.wait(lead.index(0), phase)
        phase ^= 1
    for step in range(begin, end):
        stage = turn % STAGES
        mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
        a_tile = a.index(stage * GROUPS + GROUP)
        if A_BY_K:
            a_tile = a_tile.permute((1, 0))
        begun = ()
        for i in gl.static_range(len(accs)):
            b_tile = b[i].index(stage)
            if not B_BY_K:
                b_tile = b_tile.permute((1, 0))
            begun = begun + (warpgroup_mma(a_tile, b_tile, accs[i], use_acc=step > begin, is_async=True),)
        accs = _wait(begun, 1)
        if step > begin:
            mbarrier.arrive(empty.index((turn - 1) % STAGES))
        if GROUP == 0:  # noqa: SIM102  (known when compiling)
            if leads & (step - begin == LAG - 1):
                mbarrier.arrive(lead.index(0))
        turn += 1
    accs = _wait(accs, 0)
    if end > begin:
        mbarrier.arrive(empty.index((turn - 1) % STAGES))
    return accs, turn, phase
