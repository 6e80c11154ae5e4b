"""Backend "triton": anchored softmax. Hopper GPUs run their own kernels for bf16, all others the portable ones."""

from kernels.head import Needs, Problem, Scanner
from kernels.triton.gae import gae
from kernels.triton.kl import linear_kl, linear_kl_backward
from kernels.triton.norm import add_rms_norm
from kernels.triton.policy import row_coefficients
from kernels.triton.scale import scale_
from kernels.triton.scanner import AnchoredScanner

__all__ = ["add_rms_norm", "gae", "linear_kl", "linear_kl_backward", "make_scanner", "row_coefficients", "scale_"]


def make_scanner(problem: Problem, workspace: float, needs: Needs) -> Scanner:
    """See :class:`kernels.head.Backend`."""
    return AnchoredScanner(problem, workspace, needs)
