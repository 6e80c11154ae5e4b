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
    """(row, column) of a tile: BAND rows of tiles go through a column before the next, while its B is in L2."""
    per_band = BAND * tiles_n
    first = tile // per_band * BAND
    size = min(tiles_m - first, BAND)
    return first + tile % per_band % size, tile % per_band // size


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers that each wait for ARRIVALS."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def produce(
    a_desc, b_desc, ring, turn, m, n, begin, end,
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
        place_b = [k, n * BN] if B_BY_K else [n * BN, k]
        tma.async_copy_global_to_shared(b_desc, place_b, full.index(stage), b.index(stage))
        turn += 1
    return turn


@gluon.jit
def consume(
    acc, ring, turn, first, begin, end,
    GROUP: gl.constexpr, STAGES: gl.constexpr, A_BY_K: gl.constexpr, B_BY_K: gl.constexpr,
):  # fmt: skip
    """Multiply the steps ``begin`` to ``end`` onto ``acc``, which step ``first`` overwrites.

    One product stays in flight: a stage is given back when the next one's product has been issued.
    """
    a, b, full, empty, _ = ring
    for step in range(begin, end):
        stage = turn % STAGES
        mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
        a_tile = a.index(stage * GROUPS + GROUP)
        b_tile = b.index(stage)
        if A_BY_K:
            a_tile = a_tile.permute((1, 0))
        if not B_BY_K:
            b_tile = b_tile.permute((1, 0))
        acc = warpgroup_mma(a_tile, b_tile, acc, use_acc=step > first, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        if step > begin:
            mbarrier.arrive(empty.index((turn - 1) % STAGES))
        turn += 1
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    if end > begin:
        mbarrier.arrive(empty.index((turn - 1) % STAGES))
    return acc, turn


@gluon.jit
def consume_tile(
    acc, ring, turn, phase, begin, end,
    GROUP: gl.constexpr, LAG: gl.constexpr, STAGES: gl.constexpr,
    A_BY_K: gl.constexpr, B_BY_K: gl.constexpr,
):  # fmt: skip
    """All steps of a tile, the second warpgroup LAG steps behind the first. Gives ``acc, turn, phase``."""
    _, _, _, _, lead = ring
    middle = begin
    # In a tile shorter than that, the ring would let a warpgroup signal twice before the next has seen the first.
    if end - begin + min(end - begin, LAG) > STAGES:
        if GROUP == 0:
            middle = min(begin + LAG, end)
            acc, turn = consume(acc, ring, turn, begin, begin, middle, GROUP, STAGES, A_BY_K, B_BY_K)
            mbarrier.arrive(lead.index(0))
        else:
            mbarrier.wait(lead.index(0), phase)
        phase ^= 1
    acc, turn = consume(acc, ring, turn, begin, middle, end, GROUP, STAGES, A_BY_K, B_BY_K)
    return acc, turn, phase
