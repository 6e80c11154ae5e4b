"""Backend "cpu": an anchored softmax in C++ (csrc/cpu), threaded by ATen and vectorised.

With a guess ``a`` of each row's logsumexp, one product whose tiles become E = exp(z − a) while they are in cache gives
the row's sums, and E for the gradient; no logit is stored. What a loss asks for is a factor of a whole row, so it goes
to the small operands: dX = factor·(Eᵀ·W) and dW = E·(factor·X), with E ``[V, n]``.
"""

import math

import torch
from torch import Tensor

from kernels import _cpu
from kernels.head import Gradients, Needs, Problem, RowGradients, Statistics, product_dtype
from kernels.logits import GradientSums, weight_blocks

REACH = math.exp(40.0)
"""A row whose Σ exp(z − a) is further from 1 is scanned again with its maximum: fp32 would lose its small terms."""
FARTHEST_ANCHOR = 1e4
"""Further from zero, z − a would lose what there is of z."""
PREFERRED_BYTES = 0.75
"""Of E for each logit of the call: several chunks cost little, and an eighth of what eager torch takes is more."""
PREFERRED_ROWS = range(64, 2048)
"""Fewer rows cost more reading and writing dW than multiplying; more save nothing."""


def round_up(rows: int) -> int:
    """To whole vectors of rows, at least one: E has as many columns."""
    return max(1, -(-rows // _cpu.ROW_MULTIPLE)) * _cpu.ROW_MULTIPLE


class CpuScanner:
    """A :class:`kernels.head.Scanner` that keeps exp(z − anchor) of a chunk."""

    def __init__(self, problem: Problem, workspace: float, needs: Needs) -> None:
        self.problem, self.needs = problem, needs
        self.dtype = product_dtype(problem.hidden.dtype)
        # Where the gradient is more than a multiple of E, its logarithm is needed, and a bf16's is off by 0.004.
        self.reshapes = any(needs) and (problem.entropy_gradient or problem.head.softcap is not None)
        self.word_bytes = self.dtype.itemsize + (4 if self.reshapes and self.dtype != torch.float32 else 0)
        vocabulary, width = problem.head.weight.shape
        row_bytes = vocabulary // 40 + 24 * width  # the vocabulary's sums stripe by stripe; copies of hidden and dX
        if any(needs):
            row_bytes += vocabulary * self.word_bytes + vocabulary * self.dtype.itemsize // 8  # E; threads' sums of dX
        self.chunk_rows = max(1, int(workspace) // row_bytes // _cpu.ROW_MULTIPLE) * _cpu.ROW_MULTIPLE
        self.preferred_rows = self._preferred_rows() if any(needs) else self.chunk_rows
        # Columns of E; the first belong to live rows of earlier chunks, whose products wait for one another.
        self.storage = problem.hidden.new_empty(vocabulary, 0, dtype=self.dtype)
        self.wide = self.storage.float()
        self.waiting: list[tuple[Tensor, Tensor]] = []

    def scan(self, rows: slice) -> Statistics:
        valid = self.problem.valid[rows]
        self.columns = self.exponentials = None  # views of what may be too small
        self.columns = self._columns(len(valid)) if any(self.needs) else None
        self.exponentials = self._in_fp32(self.columns) if self.columns is not None and self.reshapes else self.columns
        self.anchor = self._guess(rows)
        found = self._scan(rows, None)
        in_reach = (found[3] > 1 / REACH) & (found[3] < REACH)
        off = (valid & ~in_reach).nonzero().squeeze(1)
        if len(off):
            self.anchor[off] = found[4, off].nan_to_num(neginf=0)
            found[:, off] = self._scan(rows, off)
        self.logprobs, self.entropy, self.others, self.inverse_total, _ = found
        return Statistics(*(torch.where(valid, value, 0.0) for value in (self.logprobs, self.entropy)))

    def begin(self, chunks: int) -> None:
        self.gradients = ExponentialGradients(self.problem.hidden, self.problem.head, self.needs, chunks)

    def backward(self, rows: slice, grads: RowGradients) -> None:
        live = grads.live()
        if len(live):
            self.waiting.append((live + rows.start, self._bind(rows, live, grads)))

    def finish(self) -> Gradients:
        self._multiply_waiting()
        return self.gradients.finish()

    def _preferred_rows(self) -> int:
        """Rows of a chunk if every row is its own; as few chunks as PREFERRED_BYTES allows, about evenly full."""
        rows = len(self.problem.hidden)
        most = round_up(int(PREFERRED_BYTES * rows / self.word_bytes))
        most = min(self.chunk_rows, max(PREFERRED_ROWS.start, min(most, PREFERRED_ROWS.stop)))
        return round_up(-(-rows // max(1, -(-rows // most))))

    def _guess(self, rows: slice) -> Tensor:
        """A guess of logsumexp(z): at worst the target's logit, which as good as is one where the target is likely."""
        problem = self.problem
        if problem.anchor is not None:
            guess = problem.anchor[rows].clone()
        else:
            head, targets = problem.head, problem.targets[rows]
            logit = torch.bmm(problem.hidden[rows, None], head.weight[targets, :, None]).flatten().float()
            if head.bias is not None:
                logit += head.bias[targets]
            if head.softcap is not None:
                logit = (logit / head.softcap).tanh_().mul_(head.softcap)
            guess = logit.mul_(head.inverse_temperature[rows])
            if problem.logprob_guess is not None:
                guess -= problem.logprob_guess[rows].nan_to_num(posinf=0, neginf=0)
        return guess.nan_to_num_(neginf=0).clamp_(-FARTHEST_ANCHOR, FARTHEST_ANCHOR)

    def _columns(self, rows: int) -> Tensor:
        """Room for the E of so many rows, padding included, behind those that wait."""
        size = round_up(rows)
        if self._waiting_rows() + size > self.storage.shape[1]:
            self._multiply_waiting()
        if size > self.storage.shape[1]:
            words = len(self.storage)
            self.storage = self.storage.new_empty(words, 0)  # frees the smaller one first
            self.storage = self.storage.new_empty(words, size)
        start = self._waiting_rows()
        return self.storage[:, start : start + size]

    def _in_fp32(self, columns: Tensor) -> Tensor:
        """Where E of a chunk is made until it is reshaped into ``columns``."""
        if columns.dtype == torch.float32:
            return columns
        if columns.shape[1] > self.wide.shape[1]:
            self.wide = self.wide.new_empty(len(columns), 0)  # frees the smaller one first
            self.wide = self.wide.new_empty(columns.shape)
        return self.wide

    def _waiting_rows(self) -> int:
        return sum(len(rows) for rows, _ in self.waiting)

    def _multiply_waiting(self) -> None:
        count = self._waiting_rows()
        if count % 2:
            self.storage[:, count] = 0  # _cpu.add_product reads pairs
        if count:
            rows, factors = map(torch.cat, zip(*self.waiting, strict=True))
            self.waiting = []
            self.gradients.add(rows, self.storage[:, :count], factors)

    def _scan(self, rows: slice, some: Tensor | None) -> Tensor:
        """The five statistics of ``_cpu.scan``, ``[5, n]``, of a chunk or of some of its rows."""
        hidden, head, targets = self.problem.hidden[rows], self.problem.head, self.problem.targets[rows]
        scale, anchor = head.inverse_temperature[rows], self.anchor
        if some is not None:
            hidden, targets, scale, anchor = (one.index_select(0, some) for one in (hidden, targets, scale, anchor))
        columns = None if self.exponentials is None else some
        return _cpu.scan(
            hidden, head.weight, head.bias, scale, head.softcap or 0.0, targets, anchor, self.exponentials, columns
        )

    def _bind(self, rows: slice, live: Tensor, grads: RowGradients) -> Tensor:
        """Make E that of the live rows alone, the target's in, and give each row's factor: dz = factor·E."""
        assert self.columns is not None and self.exponentials is not None
        dentropy = torch.zeros_like(grads.dlogprob) if grads.dentropy is None else grads.dentropy
        head, targets = self.problem.head, self.problem.targets[rows]
        chunk = [targets, head.inverse_temperature[rows], grads.dlogprob, dentropy, self.anchor, self.logprobs]
        chunk += [self.entropy, self.others, self.inverse_total]
        if len(live) < len(targets):
            _cpu.compact(self.exponentials, live)
            chunk = [one.index_select(0, live) for one in chunk]
        targets, scale, dlogprob, dentropy, anchor, logprobs, entropy, others, inverse_total = chunk
        exponentials, factor = self.columns[:, : len(live)], -scale * inverse_total
        if not self.reshapes:
            factor, own = factor * dlogprob, -others
        else:
            _cpu.reshape(
                self.exponentials, exponentials, dlogprob, dentropy, entropy, inverse_total, anchor, scale,
                head.softcap or 0.0,
            )  # fmt: skip
            total = logprobs.exp() / inverse_total
            own = torch.where(total > 0, dentropy * total * (logprobs + entropy), 0.0) - dlogprob * others
            if head.softcap is not None:  # the target's own logit, which its E may be too small for
                own *= 1 - ((anchor + logprobs - inverse_total.log()) / (scale * head.softcap)).square()
        # 1 − p without a difference; and as p → 1 the target's is the whole gradient, so its rounding is made good.
        rounded = own.to(self.dtype)
        exponentials[targets, torch.arange(len(live))] = rounded
        return torch.where(rounded != 0, factor * (own / rounded), factor)


class ExponentialGradients(GradientSums):
    """Made of E and a factor of each row."""

    rounded_chunks = 3  # adds at most 15 % to dW's error

    def add(self, rows: Tensor, exponentials: Tensor, factor: Tensor) -> None:
        """Add the share of some rows, given dz = factor·exponentials."""
        if self.dhidden is not None:
            dhidden = _cpu.transposed_product(exponentials, self.head.weight) * factor[:, None]
            self.dhidden.index_copy_(0, rows, dhidden.to(self.dhidden.dtype))
        if self.need_weight:
            hidden = (self.hidden.index_select(0, rows) * factor[:, None]).to(self.dtype)
            add = self.dweight is not None
            if self.dweight is None:
                weight = self.head.weight
                self.dweight = weight.new_empty(weight.shape, dtype=self.sum_dtype)
            _cpu.add_product(exponentials, hidden, self.dweight, add)
        if self.dbias is not None:
            for words, block in weight_blocks(exponentials, torch.float32):
                self.dbias[words] += block @ factor


make_scanner = CpuScanner


def gae(
    rewards: Tensor, values: Tensor, cu_seqlens: Tensor, gamma: float, lam: float, bootstrap: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See :func:`kernels.gae`."""
    after = None if bootstrap is None else bootstrap.detach().contiguous()
    advantages, returns = _cpu.gae(
        rewards.contiguous(), values.contiguous(), cu_seqlens.long().contiguous(), gamma, lam, after
    )
    return advantages, returns
