"""Anchored softmax over a chunk of rows; the scheme is in docs/kernels.md."""

from functools import cache

import torch
import triton
from torch import Tensor

from kernels.head import Gradients, Needs, Problem, RowGradients, Statistics
from kernels.triton import rows as row_kernels
from kernels.triton.hopper.products import HopperProducts
from kernels.triton.maths import INTERPRETED
from kernels.triton.products import PortableProducts

STATISTICS_ROWS = 16
STATISTICS_TILES = 128
PLAN_BLOCK = 1024
MOVE_BLOCK = 4096
ROW_BYTES = 96
"""A row's share of the per-row vectors."""


@cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors, the size of a persistent grid."""
    return 4 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


class AnchoredScanner:
    """A :class:`kernels.head.Scanner` that keeps E = exp(z − anchor) of a chunk, and scales rows rather than E."""

    def __init__(self, problem: Problem, workspace: float, needs: Needs) -> None:
        bias = problem.head.bias
        if bias is not None:  # the kernels step through it by one
            problem = problem._replace(head=problem.head._replace(bias=bias.contiguous()))
        self.problem, self.needs, self.keeps = problem, needs, any(needs)
        hidden, weight = problem.hidden, problem.head.weight
        self.device, self.programs = hidden.device, processors(hidden.device)
        self.vocabulary, self.width = weight.shape
        products = HopperProducts if HopperProducts.fit(problem) else PortableProducts
        self.products = products(problem, workspace, needs, self.programs)
        self.tiles = triton.cdiv(self.vocabulary, self.products.scan_columns)
        bytes_per_row = 8 * self.tiles + ROW_BYTES + self.products.copied_bytes
        bytes_per_row += self.products.bytes_per_row if self.keeps else 0
        fixed = self.products.fixed_bytes if self.keeps else 0
        self.chunk_rows = max(1, int(workspace - fixed) // bytes_per_row)
        if self.chunk_rows > self.products.tile_rows:
            self.chunk_rows -= self.chunk_rows % self.products.tile_rows
        self.size = 0

    def _reserve(self, count: int) -> None:
        """Room for ``count`` rows; what is there is forgotten."""
        if count <= self.size:
            return
        self.products.release()  # before more is taken
        self.size, places = count, triton.cdiv(count, 4) * 4  # so that every vector begins at 16 bytes
        fp32, int32 = torch.empty(0, device=self.device), torch.empty(0, device=self.device, dtype=torch.int32)
        self.totals, self.weighted = fp32.new_empty(2, self.tiles * places)
        self.logit, self.anchor, self.rest, self.log_sum = fp32.new_empty(4, places)
        self.target, self.list = int32.new_empty(2, places)
        self.missed = int32.new_empty(1)
        if self.keeps:
            self.source, self.hole, self.tail = int32.new_empty(3, places)
            self.plan = int32.new_empty(4)
            self.products.reserve(count)

    def scan(self, rows: slice) -> Statistics:
        count = rows.stop - rows.start
        self._reserve(count)
        logprobs, entropy = (torch.empty(count, device=self.device) for _ in range(2))
        self.statistics = Statistics(logprobs, entropy)
        if count == 0:
            return self.statistics
        problem = self.problem
        head = problem.head
        self.hidden = problem.hidden[rows]  # drops the last chunk's copy before the next is made
        if self.hidden.stride(1) != 1:
            self.hidden = self.hidden.contiguous()
        self.temperature = row_kernels.aligned(head.inverse_temperature[rows])
        guess, guesses = None, ""
        if problem.anchor is not None:
            guess, guesses = row_kernels.aligned(problem.anchor[rows]), "anchor"
        elif problem.logprob_guess is not None:
            guess, guesses = row_kernels.aligned(problem.logprob_guess[rows]), "logprob"
        has_target = self.products.flags(count)
        bias = head.bias if head.bias is not None else self.temperature
        softcap = head.softcap if head.softcap is not None else 0.0
        row_kernels.set_anchor[(count,)](
            self.hidden, head.weight, bias, row_kernels.aligned(problem.targets[rows]),
            self.temperature if guess is None else guess, self.temperature, softcap, self.logit, self.anchor,
            self.target, self.target if has_target is None else has_target,
            self.hidden.stride(0), *head.weight.stride(), self.vocabulary, self.tiles, self.width,
            BH=min(1024, triton.next_power_of_2(self.width)), BN=self.products.scan_columns,
            FLAGS=has_target is not None, GUESS=guesses, BIAS=head.bias is not None, SOFTCAP=head.softcap is not None,
            num_warps=4,
        )  # fmt: skip
        self.missed.zero_()
        self.products.scan(self, has_target)
        self._row_statistics(rows, logprobs, entropy, listed=False)
        # Rows whose anchor missed, once more from their true maximum: kernels that return at once if there are none.
        self.products.rescan(self, maximum=True)
        row_kernels.reset_anchor[(triton.cdiv(count, STATISTICS_ROWS),)](
            self.totals, self.anchor, self.list, self.missed, count, self.tiles, STATISTICS_ROWS, STATISTICS_TILES
        )
        self.products.rescan(self, maximum=False)
        self._row_statistics(rows, logprobs, entropy, listed=True)
        return self.statistics

    def _row_statistics(self, rows: slice, logprobs: Tensor, entropy: Tensor, listed: bool) -> None:
        count, valid = len(logprobs), row_kernels.aligned(self.problem.valid[rows])
        row_kernels.row_statistics[(triton.cdiv(count, STATISTICS_ROWS),)](
            self.totals, self.weighted, self.logit, self.anchor, valid, logprobs, entropy,
            self.rest, self.log_sum, self.list, self.missed, count, self.tiles, STATISTICS_ROWS, STATISTICS_TILES,
            LISTED=listed,
        )  # fmt: skip

    def begin(self, chunks: int) -> None:
        self.products.begin(chunks)
        self.dbias = torch.zeros(self.vocabulary, device=self.device) if self.needs[2] else None

    def backward(self, rows: slice, grads: RowGradients) -> None:
        count = rows.stop - rows.start
        if count == 0:
            return
        head, products = self.problem.head, self.products
        dlogprob = row_kernels.aligned(grads.dlogprob)
        dentropy = dlogprob if grads.dentropy is None else row_kernels.aligned(grads.dentropy)
        with_entropy, softcap = grads.dentropy is not None, head.softcap
        row_kernels.plan_rows[(1,)](
            dlogprob, dentropy, self.source, self.hole, self.tail, self.plan, count,
            triton.cdiv(self.width, products.dhidden_columns), products.dhidden_programs, products.spare_tiles,
            BLOCK=PLAN_BLOCK, TILE=products.tile_rows, ENTROPY=with_entropy,
        )  # fmt: skip
        scanned = products.scanned
        row_kernels.move_rows[(8 * self.programs,)](
            scanned, self.hole, self.tail, self.plan, self.vocabulary, scanned.stride(0), BLOCK=MOVE_BLOCK
        )
        e, e_stride = products.e, products.e.stride(0)
        if products.reshapes:
            row_kernels.reshape[(8 * self.programs,)](
                scanned, e, dlogprob, dentropy, *self.statistics, self.log_sum, self.anchor, self.logit,
                self.temperature, self.target, self.source, self.plan, softcap or 0.0, self.vocabulary,
                scanned.stride(0), e_stride, BLOCK=MOVE_BLOCK, ENTROPY=with_entropy, SOFTCAP=softcap is not None,
            )  # fmt: skip
        dhidden = products.dhidden
        row_kernels.bind_rows[(triton.cdiv(count, 64) * 64,)](
            self.hidden, e, dlogprob, self.rest, self.log_sum, self.temperature, self.target, self.source, self.plan,
            products.factor, products.scaled, products.factor if dhidden is None else dhidden[rows], count,
            self.vocabulary, self.hidden.stride(0), e_stride, self.width,
            BH=min(1024, triton.next_power_of_2(self.width)), RESHAPED=products.reshapes, SCALE=self.needs[1],
            CLEAR=self.needs[0], num_warps=4,
        )  # fmt: skip
        products.backward(self, rows)
        if self.dbias is not None:
            row_kernels.add_dbias[(triton.cdiv(self.vocabulary, 128),)](
                e, products.factor, self.dbias, self.plan, self.vocabulary, e_stride, BM=32, BN=128
            )

    def finish(self) -> Gradients:
        dhidden, dweight = self.products.finish()
        bias = self.problem.head.bias
        dbias = self.dbias.to(bias.dtype) if self.dbias is not None and bias is not None else None
        return dhidden, dweight, dbias
