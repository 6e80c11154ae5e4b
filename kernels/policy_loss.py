"""``linear_policy_loss``: a loss of each token under a head, from its log-probability and its entropy."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels import coefficients
from kernels.checks import LARGEST, Checker, check_head, check_values, read_bounds, reads_values
from kernels.chunked import Span, loss_pass
from kernels.coefficients import RATIOS, PolicySpec, Rows
from kernels.dispatch import resolve
from kernels.head import Problem, RowGradients, Statistics
from kernels.loss_ops import collects_its_gradients, differences, fake_ticket, gradients_needed, leave
from kernels.ops import GIB, as_needs, fake_columns, head_arguments, running_on
from kernels.token_losses import KL_ESTIMATORS, LOSSES


class PolicyLossOutput(NamedTuple):
    """What :func:`linear_policy_loss` gives. Only ``loss`` has a gradient; ignored rows hold 0, their ratio 1."""

    loss: Tensor
    """fp32 scalar, Σ token_weights · loss."""
    logprobs: Tensor
    """fp32 ``[T]``, of the policy being trained, nats."""
    entropy: Tensor
    """fp32 ``[T]``, nats."""
    ratio: Tensor
    """fp32 ``[T]``, exp(new − old), or the sequence's as ``ratio`` says; 1 without old_logprobs."""
    clipped: Tensor
    """bool ``[T]``: a clip decided the loss; with ``"cispo"``, which keeps the gradient, the ratio was clipped."""
    clamped: Tensor
    """bool ``[T]``: a log-ratio that went into exp lay outside ±20."""
    losses: Tensor
    """fp32 ``[T]``, token_weights · loss of each row, whose sum ``loss`` is."""


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    advantages: Tensor | None,
    token_weights: Tensor,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    behaviour_logprobs: Tensor | None = None,
    loss: str = "clip",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: float = 0.0,
    is_cap: float | None = None,
    cu_seqlens: Tensor | None = None,
    ratio: str = "token",
    dual_clip: float | None = None,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    workspace_gib: float = 1.25,
    backend: str | None = None,
) -> PolicyLossOutput:
    """Σ_t token_weights_t · loss_t of a policy given by a linear head, with its gradients made during the forward pass.

    The formulas, with their sources, are in :mod:`kernels.token_losses`, and in
    :func:`kernels.coefficients.row_coefficients` how they are put together. The caller puts the global
    normaliser into the weights, so that the gradient is the same for every split into microbatches and ranks. Rows
    whose coefficient is zero (ignored, clipped, zero advantage or weight) take no part in the gradient's products.
    The backward pass only multiplies by the upstream scalar, in place, and so runs once.

    Args:
        hidden, weight, targets, bias, temperature, softcap, ignore_index, workspace_gib, backend: as in
            :func:`linear_logprob`. Differentiable in hidden, weight and bias.
        advantages: ``[T]``; None with ``loss="likelihood"``.
        token_weights: ``[T]``.
        old_logprobs: ``[T]``, of the policy at the start of the update. None stands for the policy being trained,
            detached: right in an update's only optimizer step, where every ratio is 1.
        ref_logprobs: ``[T]``, of the reference policy; needed by ``kl_coef``.
        behaviour_logprobs: ``[T]``, of the policy that sampled; used with ``is_cap``. Like all of these, a constant.
        loss: ``"clip"`` (PPO), ``"reinforce"``, ``"likelihood"`` (SFT, best-of-K) or ``"cispo"`` (the clipped ratio is
            a weight of REINFORCE's gradient).
        clip_low, clip_high: the ratio is clipped to 1 − clip_low … 1 + clip_high. From clip_low = 1 on there is no
            lower bound, as in the CISPO paper.
        kl_coef: weight of the KL to the reference in the loss.
        kl_estimator: ``"k1"`` (with the gradient of the true KL), ``"k2"`` or ``"k3"``.
        entropy_coef: weight of the entropy bonus.
        is_cap: multiply policy and KL terms, not the entropy bonus, by min(exp(old − behaviour), is_cap).
        cu_seqlens: ``[sequences + 1]`` int32 or int64, bounds of the sequences in rows of ``hidden``; on the CPU or
            hidden's device, where sequence ratios with a gradient read it back, once.
        ratio: ``"token"``; or, of whole sequences (needs ``cu_seqlens``), ``"sequence"`` for exp of the log-ratios' sum
            (RLOO) or ``"sequence_mean"`` for exp of their mean over rows that are not ignored (GSPO). The importance
            weights of ``is_cap`` are ratios of the same kind.
        dual_clip: None, or above 1: with ``"clip"``, the loss of a row with a negative advantage A stops at
            −dual_clip·A, however large its ratio.

    Returns:
        PolicyLossOutput: the loss and detached per-row metrics.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`linear_logprob`; RuntimeError also for a second backward pass.
    """
    check = Checker("linear_policy_loss")
    check_head(check, hidden, weight, targets, bias, temperature, softcap, ignore_index, workspace_gib, backend)
    spec = PolicySpec(loss, clip_low, clip_high, kl_coef, kl_estimator, entropy_coef, is_cap, ratio, dual_clip)
    data = (token_weights, advantages, old_logprobs, ref_logprobs, behaviour_logprobs)
    _check(check, spec, len(hidden), hidden.device, *data, cu_seqlens)
    outputs = policy_loss_op(
        *head_arguments(hidden, weight, bias, targets, temperature),
        *(None if one is None else one.detach() for one in data), cu_seqlens, *spec, softcap, ignore_index,
        gradients_needed(hidden, weight, bias), workspace_gib * GIB, backend,
    )  # fmt: skip
    return PolicyLossOutput(*outputs[:-1])


def _check(
    check: Checker,
    spec: PolicySpec,
    count: int,
    device: torch.device,
    token_weights: Tensor,
    advantages: Tensor | None,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    behaviour_logprobs: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Check a policy loss's settings and per-row data."""
    check.choice("loss", spec.loss, LOSSES)
    check.choice("kl_estimator", spec.kl_estimator, KL_ESTIMATORS)
    check.choice("ratio", spec.ratio, RATIOS)
    for name, number in (("clip_low", spec.clip_low), ("clip_high", spec.clip_high)):
        check.number(name, number, "a number from 0", 0, finite=False)
    check.number("kl_coef", spec.kl_coef, "a number from 0", 0)
    check.number("entropy_coef", spec.entropy_coef, "a number", -LARGEST)
    if spec.dual_clip is not None:
        check.number("dual_clip", spec.dual_clip, "None or a number above 1", 1, strict=True, finite=False)
        taking = " or ".join(f'loss="{name}"' for name, loss in LOSSES.items() if loss.dual_clip)
        check.require(spec.record.dual_clip, "dual_clip", spec.dual_clip, "None without {}", taking)

    for name, value, reason in (
        ("token_weights", token_weights, "every loss"),
        ("advantages", advantages, f"loss={spec.loss!r}" if spec.record.advantages else ""),
        ("old_logprobs", old_logprobs, ""),
        ("ref_logprobs", ref_logprobs, "kl_coef > 0" if spec.kl_coef > 0 else ""),
        ("behaviour_logprobs", behaviour_logprobs, "is_cap" if spec.is_cap is not None else ""),
    ):
        if reason:
            check.needed(name, value, "[T] floating", reason)
        if value is not None:
            check.row(name, value, count, device)
    if spec.is_cap is not None:
        check.number("is_cap", spec.is_cap, "None or a number above 0", 0, strict=True, finite=False)
        check.require(spec.record.advantages, "is_cap", spec.is_cap, "None with loss={!r}", spec.loss)
    if spec.ties_rows:
        check.needed("cu_seqlens", cu_seqlens, "[sequences + 1]", f"ratio={spec.ratio!r}")
    if cu_seqlens is not None:
        check.bounds("cu_seqlens", cu_seqlens, device)


@torch.library.custom_op("tandem::linear_policy_loss", mutates_args=())
def policy_loss_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    inverse_temperature: Tensor,
    token_weights: Tensor,
    advantages: Tensor | None,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    behaviour_logprobs: Tensor | None,
    cu_seqlens: Tensor | None,
    loss: str,
    clip_low: float,
    clip_high: float,
    kl_coef: float,
    kl_estimator: str,
    entropy_coef: float,
    is_cap: float | None,
    ratio: str,
    dual_clip: float | None,
    softcap: float | None,
    ignore_index: int,
    needs: list[bool],
    workspace: float,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :func:`kernels.linear_policy_loss`; gives what PolicyLossOutput has, and a ticket."""
    check_values("linear_policy_loss", targets, len(weight), ignore_index, inverse_temperature)
    module = resolve("linear_policy_loss", hidden.device, backend)
    spec = PolicySpec(loss, clip_low, clip_high, kl_coef, kl_estimator, entropy_coef, is_cap, ratio, dual_clip)
    lengths = lengths_on_host = None
    if cu_seqlens is not None:
        bounds = None
        if (spec.ties_rows and any(needs)) or reads_values(cu_seqlens.device):
            bounds = read_bounds("linear_policy_loss", cu_seqlens, len(hidden))
        if spec.ties_rows:
            lengths = cu_seqlens.diff().to(hidden.device, torch.int64)
            lengths_on_host = None if bounds is None else differences(bounds)

    row_coefficients = getattr(module, "row_coefficients", coefficients.row_coefficients)
    with running_on(hidden.device):
        given = (token_weights, advantages, old_logprobs, ref_logprobs, behaviour_logprobs)
        columns = [None if column is None else column.float() for column in given]
        _, _, old, ref, behaviour = columns
        guess = next((column for column in (old, behaviour, ref) if column is not None), None)
        problem = Problem.of(
            hidden, weight, bias, targets, inverse_temperature, softcap, ignore_index, logprob_guess=guess,
            entropy_gradient=spec.entropy_coef != 0,
        )  # fmt: skip
        rows = Rows._make([problem.valid, *columns, lengths])

        def bind(found: Statistics, span: Span) -> tuple[tuple[Tensor, ...], RowGradients]:
            unplanned = lengths is not None and lengths_on_host is None  # without gradients: all rows at once
            part = rows if unplanned else rows.span(*span)
            if part.old_logprobs is None and spec.uses_old:  # the rows are an on-policy step's: their own old ones
                part = part._replace(old_logprobs=found.logprobs)
            row = row_coefficients(spec, found.logprobs, found.entropy, part)
            grads = RowGradients(row.dlogprob, row.dentropy if spec.entropy_coef != 0 else None)
            return (row.loss, row.ratio, row.clipped, row.clamped), grads

        found, bound, gradients = loss_pass(module, problem, lengths_on_host, bind, as_needs(needs), workspace)
        row_loss, ratios, clipped, clamped = bound
        ticket = leave(module, gradients)
    return row_loss.sum(), found.logprobs, found.entropy, ratios, clipped, clamped, row_loss, ticket


@policy_loss_op.register_fake
def _(hidden: Tensor, *_: Any) -> tuple[Tensor, ...]:
    rows = hidden.shape[0]
    numbers, flags = [(rows, torch.float32)] * 3, [(rows, torch.bool)] * 2
    columns = fake_columns(hidden, *numbers, *flags, (rows, torch.float32))
    return hidden.new_empty((), dtype=torch.float32), *columns, fake_ticket()


collects_its_gradients(policy_loss_op)
