"""What a backend is: the words it shares with the code that drives it, and the functions it has.

A call works on one :class:`Problem`. ``kernels.chunked`` cuts its rows into chunks and drives a :class:`Scanner`: scan
a chunk for its row statistics, let the loss turn them into one or two scalars a row, hand those back for the gradients.
What a backend keeps of a chunk between the two (logits, or their exponentials) and how it multiplies is its own.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.coefficients import Coefficients, PolicySpec, Rows

Needs = tuple[bool, bool, bool]
"""Whether gradients by hidden, weight and bias are asked for."""

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""By hidden, weight and bias, each in its input's dtype and contiguous; None where not asked for."""


class Head(NamedTuple):
    """A head and how its logits are shaped: z = softcap(hidden·weightᵀ + bias) · inverse_temperature."""

    weight: Tensor
    """``[V, H]``, any strides."""
    bias: Tensor | None
    """``[V]`` fp32 or the weight's dtype."""
    inverse_temperature: Tensor
    """fp32 ``[T]``."""
    softcap: float | None


class Problem(NamedTuple):
    """What a scan is about. Nothing in it requires a gradient or is seen by autocast."""

    hidden: Tensor
    """``[T, H]``, the weight's dtype, any strides."""
    head: Head
    targets: Tensor
    """int64 ``[T]``; ignored rows hold 0."""
    valid: Tensor
    """bool ``[T]``: the row is not ignored. An ignored row's hidden state may hold anything, NaN too."""
    anchor: Tensor | None = None
    """fp32 ``[T]``, a guess of logsumexp(z). Guesses change the cost, and the result by rounding; ignored rows may hold
    NaN."""
    logprob_guess: Tensor | None = None
    """fp32 ``[T]``, a guess of the log-probability; with the target's logit this too is a guess of logsumexp(z).

    Old, behaviour or reference log-probabilities; in a backward pass those of the forward. May hold NaN likewise.
    """
    entropy_gradient: bool = True
    """Whether ``Scanner.backward`` may be given gradients by the entropy."""

    @classmethod
    def of(
        cls,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        inverse_temperature: Tensor,
        softcap: float | None,
        ignore_index: int,
        **guesses: Any,
    ) -> "Problem":
        """What an op is given, with rows ignored by their target."""
        valid = targets != ignore_index
        head = Head(weight, bias, inverse_temperature, softcap)
        return cls(hidden, head, torch.where(valid, targets, 0), valid, **guesses)


class Statistics(NamedTuple):
    """Row statistics of a scan, fp32 ``[n]`` each, zero where ignored."""

    logprobs: Tensor
    entropy: Tensor


class RowGradients(NamedTuple):
    """dL/dlogprob and dL/dentropy of a chunk's rows, fp32 ``[n]`` each; ``dentropy`` is None if zero for every row."""

    dlogprob: Tensor
    dentropy: Tensor | None

    def span(self, rows: slice) -> "RowGradients":
        """Those of some rows."""
        return RowGradients(self.dlogprob[rows], None if self.dentropy is None else self.dentropy[rows])

    def live(self) -> Tensor:
        """Indices of the rows that have a gradient, int64."""
        alive = self.dlogprob != 0
        if self.dentropy is not None:
            alive |= self.dentropy != 0
        return alive.nonzero().squeeze(1)


class Scanner(Protocol):
    """Works through a problem's rows with one workspace."""

    chunk_rows: int
    """Rows that fit the workspace, at least 1: no slice given to ``scan`` is longer.

    A scanner that is better off with fewer also has ``preferred_rows``, for rows that no sequence ties together.
    """

    def scan(self, rows: slice) -> Statistics:
        """Statistics of a chunk. What ``backward`` needs of it stays until the next scan."""

    def begin(self, chunks: int) -> None:
        """Gradients will be summed over so many chunks (at least 1; ``backward`` may run for fewer)."""

    def backward(self, rows: slice, grads: RowGradients) -> None:
        """Add the gradient of the chunk scanned last, which was ``rows``; rows without one cost nothing.

        Ignored rows come with zeros.
        """

    def finish(self) -> Gradients:
        """The sums, zeros where no row was live. Called once, last; the tensors are the caller's to keep."""


class Backend(Protocol):
    """A module. One that lacks a function leaves it to the next in order of preference (kernels/dispatch.py)."""

    def make_scanner(self, problem: Problem, workspace: float, needs: Needs) -> Scanner:
        """A scanner whose scratch memory stays within ``workspace`` bytes, but holds at least one row.

        If ``needs`` is all False only ``scan`` will be called, and nothing has to be kept. Nothing large is allocated
        before the first scan.
        """

    def row_coefficients(self, spec: PolicySpec, logprobs: Tensor, entropy: Tensor, rows: Rows) -> Coefficients:
        """:func:`kernels.coefficients.row_coefficients`, perhaps in fewer launches. Optional.

        Each result is a tensor of its own: an op may not return two views of one buffer.
        """

    def scale_(self, tensors: list[Tensor], factor: Tensor) -> None:
        """Multiply in place by an fp32 scalar on the tensors' device, without reading it on the host. Optional."""

    def linear_kl(
        self, hidden_p: Tensor, head_p: Head, hidden_q: Tensor, head_q: Head, direction: str, workspace: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """KL of each row, and both logsumexps, fp32 ``[T]`` each. ``direction``: as :func:`kernels.linear_kl`."""

    def linear_kl_backward(
        self,
        dkl: Tensor,
        kl: Tensor,
        lse_p: Tensor,
        lse_q: Tensor,
        hidden_p: Tensor,
        head_p: Head,
        hidden_q: Tensor,
        head_q: Head,
        direction: str,
        needs: Needs,
        workspace: float,
    ) -> Gradients:
        """Gradients by p's hidden, weight and bias for the upstream gradient ``dkl``, fp32 ``[T]``."""

    def gae(
        self, rewards: Tensor, values: Tensor, cu_seqlens: Tensor, gamma: float, lam: float, bootstrap: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See :func:`kernels.gae`; fp32, any strides."""

    def add_rms_norm(
        self, residual: Tensor, branch: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See :func:`kernels.add_rms_norm`; differentiable, any strides."""


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the backward products: fp16 has no room for p·c, so it multiplies in fp32."""
    return torch.float32 if dtype == torch.float16 else dtype
