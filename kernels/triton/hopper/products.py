"""The three products around a chunk's E in Hopper's own kernels. Nothing of them waits for the host."""

from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.head import Needs, Problem
from kernels.triton import rows as row_kernels
from kernels.triton.hopper.dhidden import dhidden_product
from kernels.triton.hopper.dweight import dweight_product
from kernels.triton.hopper.mainloop import BK, GROUPS, ROWS
from kernels.triton.hopper.scan import anchored_scan
from kernels.triton.products import Products

if TYPE_CHECKING:
    from kernels.triton.scanner import AnchoredScanner

TILE_ROWS = ROWS.value * GROUPS.value
DEPTH = BK.value
SCAN_COLUMNS = 256
# Fastest on an H100: depth BK of a step, STAGES of the ring, BAND of tile rows, LAG of the second warpgroup, BUFFERS an
# output waits in.
SCAN = {"BK": 64, "STAGES": 3, "BAND": 16, "LAG": 1, "BUFFERS": 2}
SHORT_SCAN = {"BK": 64, "STAGES": 4, "BAND": 16, "LAG": 1, "BUFFERS": 1}
SHORT_SCAN_ONLY = {"BK": 32, "STAGES": 9, "BAND": 16, "LAG": 5, "BUFFERS": 1}
"""SHORT: for a hidden size up to SHORT_WIDTH, where an epilogue is a larger part of a tile. ONLY: E is not kept."""
DHIDDEN = {"STAGES": 4, "BAND": 16, "LAG": 1}
DWEIGHT = {"STAGES": 4, "BAND": 8, "LAG": 1, "BUFFERS": 1}
SHORT_WIDTH = 1024
NARROW = {256: 1.0, 192: 1.05, 128: 1.2}
"""What a product costs in tiles of so many columns."""


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether the device has wgmma and the bulk tensor copy engine as these kernels use them."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def copies_in_bulk(tensor: Tensor) -> bool:
    """Whether the copy engine takes the matrix: contiguous rows that start at 16 bytes and do not overlap."""
    whole = tensor.stride(1) == 1 and tensor.stride(0) >= tensor.shape[1]
    return whole and tensor.stride(0) % 8 == 0 and tensor.data_ptr() % 16 == 0


def copied_bytes(hidden: Tensor) -> int:
    """Workspace that a row takes where the copy engine cannot read it as it is."""
    return 0 if copies_in_bulk(hidden) else hidden.shape[1] * hidden.itemsize


@cache
def second_stream(device: torch.device) -> torch.cuda.Stream:
    """Where dX is made while dW is."""
    return torch.cuda.Stream(device)


@cache
def swizzled(rows: int, columns: int, dtype: gl.dtype = gl.bfloat16) -> gl.NVMMASharedLayout:
    """How a box of rows × columns lies in shared memory, for bf16 as wgmma wants it."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)


def descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """The copy engine's view of a bf16 or fp32 matrix in boxes of rows × columns."""
    dtype = gl.float32 if matrix.dtype == torch.float32 else gl.bfloat16
    return TensorDescriptor.from_tensor(matrix, [rows, columns], swizzled(rows, columns, dtype))


def scan_ring(width: int, keeps: bool) -> dict[str, int]:
    """The scan's ring for a hidden size, with E kept or not."""
    if width > SHORT_WIDTH:
        return SCAN
    return SHORT_SCAN if keeps else SHORT_SCAN_ONLY


def output_columns(width: int) -> int:
    """Columns of dX's and dW's tiles: 256, unless fewer leave so much less over the edge that it pays."""
    return min((256, 192, 128), key=lambda columns: triton.cdiv(width, columns) * columns * NARROW[columns])


def b_descriptors(matrix: Tensor, columns: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """The copy engine's views of a B of so many columns a tile, and of its tail: 192 are 128 and 64."""
    tail = columns % 128
    main = descriptor(matrix, DEPTH, columns - tail)
    return main, descriptor(matrix, DEPTH, tail) if tail else main


class HopperProducts(Products):
    """For bf16 on compute capability 9.0."""

    tile_rows = TILE_ROWS
    scan_columns = SCAN_COLUMNS

    @staticmethod
    def fit(problem: Problem) -> bool:
        """Whether these kernels take the problem."""
        hidden, weight = problem.hidden, problem.head.weight
        return is_hopper(hidden.device) and hidden.dtype == torch.bfloat16 and copies_in_bulk(weight) and (
            weight.shape[1] % 8 == 0
        )  # fmt: skip

    def __init__(self, problem: Problem, workspace: float, needs: Needs, programs: int) -> None:
        super().__init__(problem, workspace, needs, programs)
        self.dhidden_columns = output_columns(self.width)
        self.copied_bytes = copied_bytes(problem.hidden)
        part_bytes = 4 * TILE_ROWS * self.dhidden_columns
        self.spare_tiles = min(2 * programs, int(workspace / 16) // part_bytes)
        self.fixed_bytes = self.spare_tiles * part_bytes
        self.sums: Tensor | None = None

    def release(self) -> None:
        super().release()
        self.partial = self.factor

    def reserve(self, count: int) -> None:
        super().reserve(count)
        columns = self.dhidden_columns
        self.partial = self.factor.new_empty(self.spare_tiles * TILE_ROWS, columns)

    def begin(self, chunks: int) -> None:
        super().begin(chunks)
        # Side by side where either alone leaves much of the chip or of the memory's rate unused.
        self.beside = all(self.needs[:2]) and (self.width <= SHORT_WIDTH or chunks > 2)
        self.dhidden_programs = max(1, self.programs // 2) if self.beside else self.programs
        self.dweight_programs = max(1, self.programs - self.dhidden_programs) if self.beside else self.programs
        if self.needs[1]:
            # Until a chunk had live rows there is nothing to add to; a sum over many is kept in fp32.
            weight = self.problem.head.weight
            self.dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
            self.sums = torch.empty_like(self.dweight, dtype=torch.float32) if chunks > 2 else None

    def flags(self, count: int) -> Tensor:
        blocks, tiles = triton.cdiv(count, TILE_ROWS) * GROUPS.value, triton.cdiv(self.vocabulary, SCAN_COLUMNS)
        return self.problem.valid.new_zeros(blocks, tiles, dtype=torch.int8)

    def scan(self, scanner: "AnchoredScanner", has_target: Tensor | None) -> None:
        head, hidden, count = self.problem.head, scanner.hidden, len(scanner.hidden)
        if not copies_in_bulk(hidden):
            hidden = hidden.clone(memory_format=torch.contiguous_format)
        columns, ring = SCAN_COLUMNS // 2, scan_ring(self.width, scanner.keeps)
        # Where the copy engine writes nothing, any matrix of its dtype will do.
        store = "" if not scanner.keeps else "fp32" if self.reshapes else "bf16"
        e = self.e[:count, : self.vocabulary] if store == "bf16" else head.weight
        anchored_scan[(self.programs,)](
            descriptor(hidden, ROWS.value, ring["BK"]), descriptor(head.weight, SCAN_COLUMNS, ring["BK"]),
            descriptor(e, ROWS.value, columns), self.scanned if store == "fp32" else scanner.totals, self.pitch,
            scanner.temperature, scanner.anchor, scanner.target, scanner.anchor if head.bias is None else head.bias,
            has_target, scanner.totals, scanner.weighted,
            head.softcap or 1.0, count, self.vocabulary, self.width, BN=SCAN_COLUMNS,
            **ring, BIAS=head.bias is not None, SOFTCAP=head.softcap is not None, STORE=store, num_warps=4,
        )  # fmt: skip

    def backward(self, scanner: "AnchoredScanner", rows: slice) -> None:
        if self.beside:
            device = self.factor.device
            here, beside = torch.cuda.current_stream(device), second_stream(device)
            beside.wait_stream(here)
            try:
                with torch.cuda.stream(beside):
                    self._multiply_dhidden(scanner, rows)
                self._multiply_dweight(scanner, rows)
            finally:  # what was begun there still reads and writes what may be freed here
                here.wait_stream(beside)
        else:
            self._multiply_dhidden(scanner, rows)
            self._multiply_dweight(scanner, rows)
        self.done += 1

    def _multiply_dhidden(self, scanner: "AnchoredScanner", rows: slice) -> None:
        count, columns = rows.stop - rows.start, self.dhidden_columns
        e = self.e[:count, : self.vocabulary]
        if self.dhidden is not None:
            dhidden = self.dhidden[rows]
            dhidden_product[(self.dhidden_programs,)](
                descriptor(e, ROWS.value, DEPTH), *b_descriptors(self.problem.head.weight, columns), self.factor,
                scanner.source, dhidden, self.partial, scanner.plan, self.vocabulary, self.width, BN=columns,
                TAIL=columns % 128, **DHIDDEN, num_warps=4,
            )  # fmt: skip
            row_kernels.finish_dhidden[(2 * self.dhidden_programs,)](
                self.partial, self.factor, scanner.source, dhidden, scanner.plan, triton.cdiv(self.width, columns),
                self.width, DHIDDEN["BAND"], TILE_ROWS, columns, triton.next_power_of_2(columns), ROWS=16,
            )  # fmt: skip

    def _multiply_dweight(self, scanner: "AnchoredScanner", rows: slice) -> None:
        count, columns = rows.stop - rows.start, self.dhidden_columns
        e = self.e[:count, : self.vocabulary]
        if self.dweight is not None:
            out = self.dweight if self.sums is None else self.sums
            adds = "" if self.done == 0 else "here" if self.sums is None else "in memory"
            box = (128 if columns == 192 else 256) // out.itemsize
            places = min(triton.cdiv(count, 64) * 64, len(self.scaled))
            dweight_product[(self.dweight_programs,)](
                descriptor(e, DEPTH, ROWS.value), *b_descriptors(self.scaled[:places], columns), out,
                descriptor(out, ROWS.value, box), scanner.plan, self.vocabulary, self.width, BN=columns,
                TAIL=columns % 128, **DWEIGHT, ADDS=adds, num_warps=4,
            )  # fmt: skip

    def finish(self) -> tuple[Tensor | None, Tensor | None]:
        if self.dweight is not None:
            if self.done == 0:  # there were no rows
                self.dweight.zero_()
            elif self.sums is not None:
                self.dweight.copy_(self.sums)
        return self.dhidden, self.dweight
