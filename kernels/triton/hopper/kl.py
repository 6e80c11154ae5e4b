"""Hopper scan of two heads for their KL divergence, in about the time of the two bare products."""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from kernels.head import Head
from kernels.triton.divergence import divergence, divergence_terms
from kernels.triton.hopper.mainloop import (
    CONSUMER_REGISTERS,
    GROUPS,
    PRODUCER_REGISTERS,
    ROWS,
    accumulator,
    allocate_ring,
    column_parts,
    consume_tile,
    make_barriers,
    produce,
    tile_place,
)
from kernels.triton.hopper.products import copies_in_bulk, descriptor, is_hopper
from kernels.triton.maths import LN2, LOG2E

TILE_COLUMNS = 256
PIECE = gl.constexpr(32)
"""Columns of a tile that the epilogue has p's and q's logits of in registers at a time."""
# p's logits of a tile take 128 KiB of shared memory, and leave room for this much of a ring.
DEPTH = 32
STAGES = 4
LAG = 1
BAND = 8


@gluon.jit
def _producer(
    x_p_desc, w_p_desc, x_q_desc, w_q_desc, ring, T, V, H_P: gl.constexpr, H_Q: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = gl.cdiv(T, ROWS * GROUPS), gl.cdiv(V, BN)
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = tile_place(tile, tiles_m, tiles_n, BAND)
        turn = produce(
            x_p_desc, (w_p_desc,), ring, turn, m, n, 0, gl.cdiv(H_P, BK), BN, BK, STAGES, False, False
        )  # fmt: skip
        turn = produce(
            x_q_desc, (w_q_desc,), ring, turn, m, n, 0, gl.cdiv(H_Q, BK), BN, BK, STAGES, False, False
        )  # fmt: skip


@gluon.jit
def _masked(acc, real, scale):
    """What lies past the vocabulary to −1e30 by the logits, which is finite for every scale."""
    return gl.where(real[None, :], acc, (-1e30 / gl.maximum(scale, 1.0))[:, None])


@gluon.jit
def _thread_sums(x):
    """Sums over what a thread holds of each row of ``x [ROWS, PIECE]``: ``[ROWS, 4]``."""
    return gl.sum(gl.sum(x.reshape((ROWS, PIECE // 8, 4, 2)), 3), 1)


@gluon.jit
def _consumer(
    GROUP: gl.constexpr, ring, store, rows_data, T, V, H_P: gl.constexpr, H_Q: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr, LAG: gl.constexpr,
    FORWARD: gl.constexpr,
):  # fmt: skip
    temperature_ptr, part_ptr = rows_data
    own = store.index(GROUP)
    PIECES: gl.constexpr = BN // PIECE
    layout: gl.constexpr = accumulator(BN).type.layout
    inner: gl.constexpr = accumulator(PIECE).type.layout
    tiles_m, tiles_n = gl.cdiv(T, ROWS * GROUPS), gl.cdiv(V, BN)
    turn = 0
    phase = 0
    m, n = tile_place(gl.program_id(0), tiles_m, tiles_n, BAND)
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        rows = (m * GROUPS + GROUP) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        inside = rows < T
        scale = gl.load(temperature_ptr + rows, mask=inside, other=0.0) * LOG2E
        real = gl.arange(0, BN, gl.SliceLayout(0, layout)) < V - n * BN

        accs, turn, phase = consume_tile(
            (accumulator(BN),), ring, turn, phase, 0, gl.cdiv(H_P, BK), GROUP, LAG, STAGES, False, False
        )  # fmt: skip
        acc = accs[0]
        if (n + 1) * BN > V:
            acc = _masked(acc, real, scale)
        max_p = gl.max(acc, 1) * scale
        own.store(acc)

        accs, turn, phase = consume_tile(
            (accumulator(BN),), ring, turn, phase, 0, gl.cdiv(H_Q, BK), GROUP, LAG, STAGES, False, False
        )  # fmt: skip
        acc = accs[0]
        if (n + 1) * BN > V:
            acc = _masked(acc, real, scale)
        max_q = gl.max(acc, 1) * scale
        pieces = column_parts(acc, PIECES)
        row: gl.constexpr = gl.SliceLayout(1, inner)
        factor = gl.convert_layout(scale, row)[:, None]
        shift_p, shift_q = gl.convert_layout(max_p, row)[:, None], gl.convert_layout(max_q, row)[:, None]
        for i in gl.static_range(PIECES):
            u_p = own.slice(i * PIECE, PIECE, dim=1).load(inner) * factor - shift_p
            u_q = gl.convert_layout(pieces[i], inner) * factor - shift_q
            u_a, u_b = (u_q, u_p) if FORWARD else (u_p, u_q)
            e_a, e_b, product, excess = divergence_terms(u_a, u_b, False)
            if i == 0:
                sum_a, sum_b = _thread_sums(e_a), _thread_sums(e_b)
                products, excesses = _thread_sums(product), _thread_sums(excess)
            else:
                sum_a += _thread_sums(e_a)
                sum_b += _thread_sums(e_b)
                products += _thread_sums(product)
                excesses += _thread_sums(excess)
        sum_a, sum_b = gl.sum(sum_a, 1), gl.sum(sum_b, 1)
        within = divergence(sum_a, sum_b, gl.sum(products, 1), gl.sum(excesses, 1))
        sum_p, sum_q = (sum_b, sum_a) if FORWARD else (sum_a, sum_b)
        places, parts = n.to(gl.int64) * T + rows, tiles_n.to(gl.int64) * T
        log_p = max_p * LN2 + gl.convert_layout(gl.log(sum_p), gl.SliceLayout(1, layout))
        log_q = max_q * LN2 + gl.convert_layout(gl.log(sum_q), gl.SliceLayout(1, layout))
        gl.store(part_ptr + places, log_p, mask=inside)
        gl.store(part_ptr + parts + places, log_q, mask=inside)
        gl.store(part_ptr + 2 * parts + places, gl.convert_layout(within, gl.SliceLayout(1, layout)), mask=inside)
        m, n = tile_place(tile + gl.num_programs(0), tiles_m, tiles_n, BAND)


@gluon.jit(do_not_specialize=["T"])
def scan_pair(
    x_p_desc, w_p_desc, x_q_desc, w_q_desc, temperature_ptr, part_ptr, T, V, H_P: gl.constexpr, H_Q: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr, LAG: gl.constexpr,
    FORWARD: gl.constexpr,
):  # fmt: skip
    """:func:`kernels.triton.kl_tiles.scan_pair` for bf16, without bias and softcap.

    A warpgroup's registers hold one head's logits of a tile: p's wait in shared memory while q's are made. A thread
    reads back what it wrote itself. LAG is at most the number of steps of either head.
    """
    x = gl.allocate_shared_memory(gl.bfloat16, [STAGES * GROUPS, ROWS, BK], x_p_desc.layout)
    # A thread's 2 × 2 neighbours, as the tensor cores leave them, in 16 bytes, and all threads' side by side.
    by_thread: gl.constexpr = gl.SharedLinearLayout([
        [0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0],
        [0, 8], [0, 16], [0, 32], [0, 64], [0, 128],
    ])  # fmt: skip
    store = gl.allocate_shared_memory(gl.float32, [GROUPS, ROWS, BN], by_thread)
    full, empty = make_barriers(STAGES, 1), make_barriers(STAGES, GROUPS)
    lead = make_barriers(1, 1)
    fence_async_shared()
    ring = (x, allocate_ring((w_p_desc,), STAGES), full, empty, lead)
    rows = (temperature_ptr, part_ptr)
    gl.warp_specialize(
        [
            (_consumer, (0, ring, store, rows, T, V, H_P, H_Q, BN, BK, STAGES, BAND, LAG, FORWARD)),
            (_consumer, (1, ring, store, rows, T, V, H_P, H_Q, BN, BK, STAGES, BAND, LAG, FORWARD)),
            (_producer, (x_p_desc, w_p_desc, x_q_desc, w_q_desc, ring, T, V, H_P, H_Q, BN, BK, STAGES, BAND)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


def fits_hopper(hidden_p: Tensor, head_p: Head, hidden_q: Tensor, head_q: Head) -> bool:
    """Whether this kernel takes the heads."""
    if not is_hopper(hidden_p.device) or head_p.softcap is not None:
        return False
    return all(
        hidden.dtype == head.weight.dtype == torch.bfloat16 and head.bias is None and copies_in_bulk(head.weight)
        and hidden.shape[1] % 8 == 0
        for hidden, head in ((hidden_p, head_p), (hidden_q, head_q))
    )  # fmt: skip


def scan_on_hopper(
    hidden_p: Tensor, weight_p: Tensor, hidden_q: Tensor, weight_q: Tensor, temperature: Tensor, part: Tensor,
    programs: int, forward: bool,
) -> None:  # fmt: skip
    """Launch the scan of a chunk's rows; ``part`` as in :func:`kernels.triton.kl_tiles.scan_pair`."""
    descriptors = []
    for hidden, weight in ((hidden_p, weight_p), (hidden_q, weight_q)):
        if not copies_in_bulk(hidden):
            hidden = hidden.clone(memory_format=torch.contiguous_format)
        descriptors += [descriptor(hidden, ROWS.value, DEPTH), descriptor(weight, TILE_COLUMNS, DEPTH)]
    widths = hidden_p.shape[1], hidden_q.shape[1]
    scan_pair[(programs,)](
        *descriptors, temperature, part, len(hidden_p), len(weight_p), *widths, BN=TILE_COLUMNS, BK=DEPTH,
        STAGES=STAGES, BAND=BAND, LAG=min(LAG, -(-min(widths) // DEPTH)), FORWARD=forward, num_warps=4,
    )  # fmt: skip
