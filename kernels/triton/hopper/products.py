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
# Fastest on an H100 (STAGES of the ring, BAND of tile rows, LAG of the second warpgroup, BUFFERS an output waits in).
SCAN = {"STAGES": 4, "BAND": 16, "LAG": 1, "BUFFERS": 1}
DHIDDEN = {"STAGES": 4, "BAND": 16, "LAG": 1}
DWEIGHT = {"STAGES": 4, "BAND": 8, "LAG": 1, "BUFFERS": 1}


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether the device has wgmma and the bulk tensor copy engine as these kernels use them."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def copies_in_bulk(tensor: Tensor) -> bool:
    """Whether the copy engine takes the matrix: contiguous rows that start at 16 bytes."""
    return tensor.stride(1) == 1 and tensor.stride(0) % 8 == 0 and tensor.data_ptr() % 16 == 0


@cache
def swizzled(rows: int, columns: int) -> gl.NVMMASharedLayout:
    """How a box of rows × columns of bf16 lies in shared memory for wgmma."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)


def descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """The copy engine's view of a bf16 matrix in boxes of rows × columns."""
    return TensorDescriptor.from_tensor(matrix, [rows, columns], swizzled(rows, columns))


def output_columns(width: int) -> int:
    """Columns of dX's and dW's tiles: 256, unless 128 leave much less over the edge."""
    wasted = triton.cdiv(width, 256) * 256 / width
    return 128 if wasted > 1.2 * triton.cdiv(width, 128) * 128 / width else 256


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
        part_bytes = 4 * TILE_ROWS * self.dhidden_columns
        self.spare_tiles = min(2 * programs, int(workspace / 16) // part_bytes)
        self.fixed_bytes = self.spare_tiles * part_bytes
        self.sums: Tensor | None = None

    def reserve(self, count: int) -> None:
        super().reserve(count)
        columns = self.dhidden_columns
        self.partial = self.factor.new_empty(self.spare_tiles * TILE_ROWS, columns)

    def begin(self, chunks: int) -> None:
        super().begin(chunks)
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
        columns = SCAN_COLUMNS // 2
        # Where the copy engine writes nothing, any matrix of its dtype will do.
        store = "" if not scanner.keeps else "fp32" if self.reshapes else "bf16"
        e = self.e[:count, : self.vocabulary] if store == "bf16" else head.weight
        anchored_scan[(self.programs,)](
            descriptor(hidden, ROWS.value, DEPTH), descriptor(head.weight, SCAN_COLUMNS, DEPTH),
            descriptor(e, ROWS.value, columns), self.scanned if store == "fp32" else scanner.totals, self.pitch,
            scanner.temperature, scanner.anchor, scanner.target, scanner.anchor if head.bias is None else head.bias,
            has_target, scanner.totals, scanner.weighted,
            head.softcap or 1.0, count, self.vocabulary, self.width, BN=SCAN_COLUMNS, **SCAN,
            BIAS=head.bias is not None, SOFTCAP=head.softcap is not None, STORE=store, num_warps=4,
        )  # fmt: skip

    def backward(self, scanner: "AnchoredScanner", rows: slice) -> None:
        count, columns = rows.stop - rows.start, self.dhidden_columns
        e = self.e[:count, : self.vocabulary]
        if self.dhidden is not None:
            dhidden = self.dhidden[rows]
            dhidden_product[(self.programs,)](
                descriptor(e, ROWS.value, DEPTH), descriptor(self.problem.head.weight, DEPTH, columns), self.factor,
                scanner.source, dhidden, self.partial, scanner.plan, self.vocabulary, self.width, BN=columns,
                **DHIDDEN, num_warps=4,
            )  # fmt: skip
            row_kernels.finish_dhidden[(2 * self.programs,)](
                self.partial, self.factor, scanner.source, dhidden, scanner.plan, triton.cdiv(self.width, columns),
                self.width, DHIDDEN["BAND"], TILE_ROWS, columns, ROWS=16,
            )  # fmt: skip
        if self.dweight is not None:
            last = self.done == self.chunks - 1
            before = "" if self.done == 0 else "bf16" if self.sums is None else "fp32"
            after = "bf16" if last or self.sums is None else "fp32"
            places = min(triton.cdiv(count, 64) * 64, len(self.scaled))
            dweight_product[(self.programs,)](
                descriptor(e, DEPTH, ROWS.value), descriptor(self.scaled[:places], DEPTH, columns), self.dweight,
                self.dweight if self.sums is None else self.sums, descriptor(self.dweight, ROWS.value, columns // 2),
                scanner.plan, self.vocabulary, self.width, BN=columns, **DWEIGHT,
                BEFORE=before, AFTER=after, num_warps=4,
            )  # fmt: skip
        self.done += 1

    def finish(self) -> tuple[Tensor | None, Tensor | None]:
        if self.dweight is not None and self.done < self.chunks:  # the last chunks had no rows
            if self.done == 0:
                self.dweight.zero_()
            elif self.sums is not None:
                self.dweight.copy_(self.sums)
        return self.dhidden, self.dweight
