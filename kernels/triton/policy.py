"""The policy loss's coefficients of a chunk of rows in one launch."""

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import coefficients as plain
from kernels.coefficients import Coefficients, PolicySpec, Rows
from kernels.token_losses import KL_ESTIMATORS, row_terms, unchanged
from kernels.triton.formulas import compiled
from kernels.triton.rows import aligned

BLOCK = 256

compiled_row_terms, compiled_unchanged = compiled(row_terms), compiled(unchanged)
LOSS = KL = None  # named here for readers and linters; a kernel has its own


def token_coefficients(
    logprob_ptr, entropy_ptr, valid_ptr, weight_ptr, advantage_ptr, old_ptr, ref_ptr, behaviour_ptr,
    loss_ptr, dlogprob_ptr, dentropy_ptr, ratio_ptr, clipped_ptr, clamped_ptr, numbers, T, BLOCK: tl.constexpr,
):  # fmt: skip
    """:func:`kernels.coefficients.row_coefficients` for token ratios.

    Columns that are not given are None. :func:`kernel` puts compiled formulas in the place of ``LOSS`` and ``KL``.
    """
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < T
    valid = tl.load(valid_ptr + rows, mask=inside, other=0) != 0
    # What an ignored row holds is not read.
    new = tl.load(logprob_ptr + rows, mask=valid, other=0.0)
    entropy = tl.load(entropy_ptr + rows, mask=valid, other=0.0)
    weight = tl.load(weight_ptr + rows, mask=valid, other=0.0)
    log_ratio = tl.zeros((BLOCK,), dtype=tl.float32)
    advantage, ref, log_importance = None, None, None
    if advantage_ptr is not None:
        advantage = tl.load(advantage_ptr + rows, mask=valid, other=0.0)
    if ref_ptr is not None:
        ref = tl.load(ref_ptr + rows, mask=valid, other=0.0)
    if old_ptr is not None:
        old = tl.load(old_ptr + rows, mask=valid, other=0.0)
        log_ratio = new - old
        if behaviour_ptr is not None:
            log_importance = old - tl.load(behaviour_ptr + rows, mask=valid, other=0.0)
    loss, dlogprob, dentropy, ratio, clipped, clamped = compiled_row_terms(
        new, entropy, log_ratio, log_importance, ref, weight, advantage, LOSS, compiled_unchanged, KL, numbers
    )
    tl.store(loss_ptr + rows, loss, mask=inside)
    tl.store(dlogprob_ptr + rows, dlogprob, mask=inside)
    tl.store(dentropy_ptr + rows, dentropy, mask=inside)
    tl.store(ratio_ptr + rows, ratio, mask=inside)
    tl.store(clipped_ptr + rows, clipped, mask=inside)
    tl.store(clamped_ptr + rows, clamped, mask=inside)


@cache
def kernel(loss: Callable[..., Any], kl_estimator: Callable[..., Any]) -> Any:
    """:func:`token_coefficients` compiled for a token loss and a KL estimator of :mod:`kernels.token_losses`.

    They are names that the kernel looks up and no arguments: a hook on Triton's compilation, such as vLLM installs, is
    given all constant arguments as JSON, and a function cannot be written so.
    """
    names = globals() | {"LOSS": compiled(loss), "KL": compiled(kl_estimator)}
    copy = FunctionType(token_coefficients.__code__, names, token_coefficients.__name__)
    copy.__module__, copy.__annotations__ = __name__, token_coefficients.__annotations__
    return triton.jit(copy, do_not_specialize=["T"])


def row_coefficients(spec: PolicySpec, logprobs: Tensor, entropy: Tensor, rows: Rows) -> Coefficients:
    """See :func:`kernels.coefficients.row_coefficients`."""
    if spec.ratio != "token":
        return plain.row_coefficients(spec, logprobs, entropy, rows)
    found = Coefficients(
        *(torch.empty_like(logprobs) for _ in range(4)), *(torch.empty_like(rows.valid) for _ in range(2))
    )
    if len(logprobs) == 0:
        return found
    columns = (None if column is None else aligned(column) for column in rows.that_count(spec)[:-1])
    launch = kernel(spec.record.formula, KL_ESTIMATORS[spec.kl_estimator])
    launch[(triton.cdiv(len(logprobs), BLOCK),)](
        logprobs, entropy, *columns, *found, spec.numbers, len(logprobs), BLOCK
    )
    return found
