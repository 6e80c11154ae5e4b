"""The three products around a chunk's E, as Triton and torch.mm have them anywhere or in Hopper's own kernels."""

from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from kernels.head import Needs, Problem, product_dtype
from kernels.logits import CAST_BYTES, block_columns
from kernels.triton.maths import INTERPRETED
from kernels.triton.scan import anchored_scan, tuned_scan

if TYPE_CHECKING:
    from kernels.triton.scanner import AnchoredScanner

LISTED_ROWS = 32
"""Rows of a tile when single rows are scanned again."""


class Products:
    """What both have in common: E, the factors and scaled rows of the live places, and the gradients so far."""

    tile_rows: int
    """Rows of a tile of dX."""
    scan_columns: int
    """Columns of a tile of logits."""
    dhidden_columns: int
    """Columns of a tile of dX."""
    dhidden_programs = 1
    """Programs that share dX's tiles."""
    spare_tiles = 0
    """Parts of tiles of dX that there is room for."""
    fixed_bytes = 0

    def __init__(self, problem: Problem, workspace: float, needs: Needs, programs: int) -> None:
        self.problem, self.needs, self.programs = problem, needs, programs
        self.vocabulary, self.width = problem.head.weight.shape
        self.dtype = product_dtype(problem.hidden.dtype)
        self.reshapes = problem.entropy_gradient or problem.head.softcap is not None
        """Whether the gradient is more than a multiple of E, which is then kept in fp32 until it is made."""
        self.scan_dtype = torch.float32 if self.reshapes else self.dtype
        # 16-byte rows for the copy engine.
        self.pitch = triton.cdiv(self.vocabulary, 8) * 8
        self.bytes_per_row = self.pitch * self.scan_dtype.itemsize + self.width * self.dtype.itemsize
        # Where the kernels cannot read hidden as it is, they copy a chunk's rows.
        self.copied_bytes = 0 if problem.hidden.stride(1) == 1 else self.width * problem.hidden.itemsize
        self.dhidden: Tensor | None = None
        self.dweight: Tensor | None = None
        self.release()

    def release(self) -> None:
        """Forgets what ``reserve`` made."""
        self.scanned = self.e = self.factor = self.scaled = self.problem.hidden.new_empty(0)

    def reserve(self, count: int) -> None:
        """Room for ``count`` rows."""
        hidden, places = self.problem.hidden, triton.cdiv(count, 64) * 64
        self.scanned = hidden.new_empty(count, self.pitch, dtype=self.scan_dtype)
        # As a matrix of the products' dtype, in the same memory.
        self.e = self.scanned.view(self.dtype)[:, : self.pitch]
        self.factor = hidden.new_empty(places, dtype=torch.float32)
        self.scaled = hidden.new_empty(places if self.needs[1] else 0, self.width, dtype=self.dtype)

    def begin(self, chunks: int) -> None:
        """Gradients will be summed over so many chunks."""
        self.chunks, self.done = chunks, 0
        if self.needs[0]:
            self.dhidden = torch.empty_like(self.problem.hidden, memory_format=torch.contiguous_format)

    def flags(self, count: int) -> Tensor | None:
        """What ``set_anchor`` marks the tiles of logits that hold a target in, if the scan wants that."""
        return None

    def scan_arguments(self, scanner: "AnchoredScanner") -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What every launch of the portable scan is given."""
        head, hidden = self.problem.head, scanner.hidden
        arguments = (
            hidden, head.weight, self.scanned if scanner.keeps else scanner.totals, scanner.temperature,
            scanner.anchor, scanner.target, scanner.anchor if head.bias is None else head.bias, scanner.totals,
            scanner.weighted, scanner.list, scanner.missed, head.softcap or 0.0, len(hidden), self.vocabulary,
            hidden.stride(0), *head.weight.stride(), self.pitch, self.width,
        )  # fmt: skip
        return arguments, {"BIAS": head.bias is not None, "SOFTCAP": head.softcap is not None}

    def rescan(self, scanner: "AnchoredScanner", maximum: bool) -> None:
        """Scan the rows whose anchor missed again: for their largest logit, or with their new anchor."""
        arguments, flags = self.scan_arguments(scanner)
        tiles = triton.cdiv(len(scanner.hidden), LISTED_ROWS) * scanner.tiles
        anchored_scan[(min(tiles, 4 * self.programs),)](
            *arguments, **flags, BM=LISTED_ROWS, BN=self.scan_columns, BK=32, LISTED=True, MAXIMUM=maximum,
            STORE=scanner.keeps and not maximum, num_warps=4,
        )  # fmt: skip


class PortableProducts(Products):
    """Any GPU, dtype and stride: the portable scan, and torch.mm over the live rows, whose number the host reads."""

    tile_rows = 128
    scan_columns = 128
    dhidden_columns = 128

    def __init__(self, problem: Problem, workspace: float, needs: Needs, programs: int) -> None:
        super().__init__(problem, workspace, needs, programs)
        if INTERPRETED:
            self.tile_rows, self.scan_columns = 32, 64
        self.bytes_per_row += self.width * self.dtype.itemsize
        self.fixed_bytes = 0 if self.dtype == problem.hidden.dtype else CAST_BYTES

    def scan(self, scanner: "AnchoredScanner", has_target: Tensor | None) -> None:
        arguments, flags = self.scan_arguments(scanner)
        flags |= {"BN": self.scan_columns, "LISTED": False, "MAXIMUM": False, "STORE": scanner.keeps}
        grid = (4 * self.programs,)
        if INTERPRETED:
            anchored_scan[grid](*arguments, **flags, BM=self.tile_rows, BK=64)
        else:
            tuned_scan[grid](*arguments, **flags)

    def backward(self, scanner: "AnchoredScanner", rows: slice) -> None:
        live = int(scanner.plan[0])  # the host waits here, once a chunk
        if live == 0:
            return
        e, weight = self.e[:live, : self.vocabulary], self.problem.head.weight
        if INTERPRETED:  # on processors with AMX oneDNN reads on behind a row's end, and NaN times its zeros is NaN
            self.scanned.view(self.dtype)[:live, self.vocabulary :] = 0
        blocks = list(block_columns(weight, self.dtype))
        if self.dhidden is not None:
            total = self.factor.new_zeros(live, self.width, dtype=self.dtype)
            for block in blocks:
                total.addmm_(e[:, block], weight[block].to(self.dtype))
            total.mul_(self.factor[:live, None])
            self.dhidden[rows].index_copy_(0, scanner.source[:live].long(), total.to(self.dhidden.dtype))
        if self.needs[1]:
            if self.dweight is None:
                dtype = self.dtype if self.chunks == 1 else torch.float32
                self.dweight = torch.zeros_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
            for block in blocks:
                self.dweight[block] += e[:, block].t() @ self.scaled[:live]

    def finish(self) -> tuple[Tensor | None, Tensor | None]:
        if not self.needs[1]:
            return self.dhidden, None
        weight = self.problem.head.weight
        if self.dweight is None:
            self.dweight = torch.zeros_like(weight, memory_format=torch.contiguous_format)
        return self.dhidden, self.dweight.to(weight.dtype)
