"""The public functions: check, choose a backend, run. The scheme is in docs/kernels.md."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels import loss_ops, ops
from kernels.checks import (
    DIRECTIONS,
    Checker,
    check_add_rms_norm,
    check_gae,
    check_head,
    check_policy,
    check_preference,
    check_settings,
    check_weight,
)
from kernels.coefficients import PolicySpec
from kernels.dispatch import resolve
from kernels.preference import PreferenceSpec

GIB = 1 << 30


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


class PreferenceLossOutput(NamedTuple):
    """What :func:`linear_preference_loss` gives. Only ``loss`` has a gradient; ignored rows hold 0."""

    loss: Tensor
    """fp32 scalar, Σ pair_weights · loss."""
    logprobs: Tensor
    """fp32 ``[T]``, of the policy being trained, nats."""
    chosen_rewards: Tensor
    """fp32 ``[pairs]``, β·Σ(new − ref) over the chosen response."""
    rejected_rewards: Tensor
    """fp32 ``[pairs]``, the same over the rejected response."""
    margins: Tensor
    """fp32 ``[pairs]``, chosen − rejected reward; above 0 the pair is told apart rightly."""
    entropy: Tensor
    """fp32 ``[T]``, nats."""


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    anchor: Tensor | None = None,
    return_entropy: bool = False,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    workspace_gib: float = 1.25,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability of each row's target under softmax(softcap(hidden·weightᵀ + bias) / temperature).

    The logits exist a chunk of rows at a time. Differentiable in hidden, weight and bias through both outputs, for any
    upstream gradient; the backward pass makes the logits again, and only for rows whose upstream gradient is not zero.

    Args:
        hidden: ``[T, H]`` bf16, fp16 or fp32, any strides.
        weight: ``[V, H]``, hidden's dtype; may be the embedding (tied), may be frozen (then it gets no gradient work).
        targets: ``[T]`` int64 in 0 … V − 1, or ``ignore_index``.
        bias: ``[V]`` fp32 or hidden's dtype; −inf masks a token out, unless a softcap bounds it.
        anchor: ``[T]`` floating, a guess of each row's logsumexp for backends that scan without a running maximum;
            it changes the cost, and the result by rounding alone.
        return_entropy: also give −Σ p·log p.
        temperature: above 0, a number or ``[T]``; not differentiated.
        softcap: z ↦ softcap · tanh(z / softcap), before the temperature.
        ignore_index: rows with this target give 0 and take no gradient.
        workspace_gib: bound on scratch memory, GiB (at least one row of logits; 64 MiB without gradients).
        backend: ``"triton"`` (GPU), ``"cpu"`` or ``"reference"``; None chooses by device.

    Returns:
        fp32 ``[T]`` in nats, or (log-probabilities, entropies).

    Raises:
        ValueError, TypeError: an argument's shape, dtype, device or value is wrong. Values of tensors are checked on
            the CPU, and on a GPU only under ``TANDEM_DEBUG=1``.
        RuntimeError: the backend asked for is not built.
    """
    check = Checker("linear_logprob")
    check_head(check, hidden, weight, targets, bias, temperature, softcap, ignore_index, workspace_gib, backend)
    if anchor is not None:
        check.row("anchor", anchor, len(hidden), hidden.device)
        anchor = anchor.detach()
    logprobs, entropy = ops.linear_logprob(
        hidden, weight, _contiguous(bias), targets, _inverse_temperature(hidden, temperature), anchor, softcap,
        ignore_index, workspace_gib * GIB, backend,
    )  # fmt: skip
    return (logprobs, entropy) if return_entropy else logprobs


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
    check_policy(check, spec, len(hidden), hidden.device, *data, cu_seqlens)
    constants = (None if one is None else one.detach() for one in data)
    outputs = loss_ops.linear_policy_loss(
        hidden, weight, _contiguous(bias), targets, _inverse_temperature(hidden, temperature), *constants, cu_seqlens,
        *spec, softcap, ignore_index, _needs(hidden, weight, bias), workspace_gib * GIB, backend,
    )  # fmt: skip
    return PolicyLossOutput(*outputs[:-1])


def linear_preference_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    cu_seqlens: Tensor,
    ref_logprobs: Tensor,
    pair_weights: Tensor,
    loss: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    workspace_gib: float = 1.25,
    backend: str | None = None,
) -> PreferenceLossOutput:
    """Σ over pairs of pair_weights · loss of the DPO family, with its gradients made during the forward pass.

    The formulas, with their sources, are in :func:`kernels.preference.pair_coefficients`; log-probabilities are summed
    over a response. Pairs without weight, and ignored rows, take no part in the gradient's products. A pair whose rows
    do not fit the workspace makes all rows be scanned twice. The backward pass only multiplies by the upstream scalar,
    in place, and so runs once.

    Args:
        hidden, weight, targets, bias, temperature, softcap, ignore_index, workspace_gib, backend: as in
            :func:`linear_logprob`. Differentiable in hidden, weight and bias.
        cu_seqlens: ``[2·pairs + 1]`` int32 or int64, bounds in rows of ``hidden`` of the responses chosen, rejected,
            chosen, rejected, …; a response may be empty. Chunks are planned from it on the host: on the CPU that costs
            nothing, on hidden's device the call reads it back once.
        ref_logprobs: ``[T]``, of the reference policy; a constant.
        pair_weights: ``[pairs]``.
        loss: ``"sigmoid"`` (DPO), ``"ipo"`` or ``"hinge"``.
        beta: β, above 0.
        label_smoothing: ε, the share of labels taken to be wrong (cDPO), 0 to below 0.5; with ``"sigmoid"`` only.

    Returns:
        PreferenceLossOutput: the loss and detached metrics.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`linear_policy_loss`; cu_seqlens' values are always checked.
    """
    check = Checker("linear_preference_loss")
    check_head(check, hidden, weight, targets, bias, temperature, softcap, ignore_index, workspace_gib, backend)
    spec = PreferenceSpec(loss, beta, label_smoothing)
    check_preference(check, spec, len(hidden), hidden.device, cu_seqlens, ref_logprobs, pair_weights)
    total, logprobs, entropy, chosen, rejected, _ = loss_ops.linear_preference_loss(
        hidden, weight, _contiguous(bias), targets, _inverse_temperature(hidden, temperature), cu_seqlens,
        ref_logprobs.detach(), pair_weights.detach(), *spec, softcap, ignore_index, _needs(hidden, weight, bias),
        workspace_gib * GIB, backend,
    )  # fmt: skip
    return PreferenceLossOutput(total, logprobs, chosen, rejected, chosen - rejected, entropy)


def linear_kl(
    hidden_p: Tensor,
    weight_p: Tensor,
    hidden_q: Tensor,
    weight_q: Tensor,
    *,
    direction: str = "reverse",
    bias_p: Tensor | None = None,
    bias_q: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    workspace_gib: float = 1.25,
    backend: str | None = None,
) -> Tensor:
    """Exact KL divergence between two heads' distributions over the whole vocabulary, row by row.

    The logits of both exist a chunk of rows at a time. Differentiable in p's hidden, weight and bias for any upstream
    gradient; q is a constant. The backward pass makes the logits again. A token that p excludes (logit −inf) counts
    nothing; one that the first distribution allows and the second excludes makes the row infinite, without a gradient
    worth having.

    Args:
        hidden_p, weight_p, bias_p: ``[T, H]``, ``[V, H]`` and ``[V]``, as in :func:`linear_logprob`.
        hidden_q, weight_q, bias_q: the same of the other model, whose width and dtype may differ, on the same device.
        direction: ``"reverse"`` for KL(p‖q), ``"forward"`` for KL(q‖p).
        temperature, softcap: as in :func:`linear_logprob`, for both.
        workspace_gib, backend: as in :func:`linear_logprob`.

    Returns:
        fp32 ``[T]``, nats, at least 0.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`linear_logprob`.
    """
    check = Checker("linear_kl")
    check_weight(check, "_p", hidden_p, weight_p, bias_p)
    check_weight(check, "_q", hidden_q, weight_q, bias_q, len(weight_p))
    fits = len(hidden_q) == len(hidden_p) and hidden_q.device == hidden_p.device
    check.require(fits, "hidden_q", hidden_q, "[{}, H] on {} like hidden_p", len(hidden_p), hidden_p.device)
    check.choice("direction", direction, DIRECTIONS)
    check_settings(check, hidden_p, temperature, softcap, workspace_gib, backend)
    check.no_tangents(hidden_p, weight_p, bias_p)
    bias_q = None if bias_q is None else bias_q.detach()
    divergence, _, _ = ops.linear_kl(
        hidden_p, weight_p, bias_p, hidden_q.detach(), weight_q.detach(), bias_q,
        _inverse_temperature(hidden_p, temperature), softcap, direction, workspace_gib * GIB, backend,
    )  # fmt: skip
    return divergence


def gae(
    rewards: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    gamma: float,
    lam: float,
    *,
    bootstrap: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates over packed sequences (Schulman et al., arXiv 1506.02438, eq. 16).

    δ_t = r_t + γ·V_{t+1} − V_t and A_t = δ_t + γ·λ·A_{t+1} within each sequence; returns are A + V.

    Args:
        rewards, values: ``[T]`` fp32, one sequence after another.
        cu_seqlens: ``[sequences + 1]`` int32 or int64, the sequences' bounds, on rewards' device or the CPU; empty
            sequences are fine.
        gamma, lam: γ and λ, 0 to 1.
        bootstrap: ``[sequences]`` fp32, the value after each sequence's last token; zeros if None.
        backend: as in :func:`linear_logprob`.

    Returns:
        (advantages, returns), ``[T]`` fp32 without gradient.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`linear_logprob`.
    """
    check_gae(rewards, values, cu_seqlens, gamma, lam, bootstrap, backend)
    bootstrap = None if bootstrap is None else bootstrap.detach()
    return ops.gae(rewards.detach(), values.detach(), cu_seqlens, gamma, lam, bootstrap, backend)


def add_rms_norm(
    residual: Tensor, branch: Tensor | None, weight: Tensor, eps: float, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """A residual stream in fp32: adds a layer's branch to it, and gives the next layer its RMSNorm in 16 bits.

    sum = residual + branch and normed = sum · rsqrt(mean(sum²) + eps) · weight (Zhang and Sennrich, arXiv 1910.07467),
    all in fp32, normed rounded once. Differentiable in residual, branch and weight through both outputs; sums over rows
    have a fixed order.

    Args:
        residual: ``[..., H]`` fp32.
        branch: the same shape, bf16, fp16 or fp32; None adds nothing, and the sum is the residual itself.
        weight: ``[H]`` bf16, fp16 or fp32; the parameter itself, which ZeRO-3 may swap out between the passes.
        eps: above 0.
        backend: as in :func:`linear_logprob`.

    Returns:
        (sum, normed), ``[..., H]`` fp32 and ``[..., H]`` in weight's dtype.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`linear_logprob`.
    """
    check_add_rms_norm(residual, branch, weight, eps, backend)
    module = resolve("add_rms_norm", residual.device, backend)
    with ops.running_on(residual.device):
        found: tuple[Tensor, Tensor] = module.add_rms_norm(residual, branch, weight, eps)
    return found


def _inverse_temperature(hidden: Tensor, temperature: float | Tensor) -> Tensor:
    """One fp32 factor a row."""
    if isinstance(temperature, Tensor):
        return temperature.detach().float().reciprocal()
    return torch.full((len(hidden),), 1 / temperature, dtype=torch.float32, device=hidden.device)


def _contiguous(bias: Tensor | None) -> Tensor | None:
    """Kernels step through a bias by one."""
    return None if bias is None else bias.contiguous()


def _needs(*inputs: Tensor | None) -> list[bool]:
    """Which gradients a loss has to make in its forward pass."""
    return [torch.is_grad_enabled() and one is not None and one.requires_grad for one in inputs]
