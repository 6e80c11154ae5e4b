"""The public functions: check, choose a backend, run. The scheme is in docs/kernels.md."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.checks import Checker, check_gae, check_head, check_policy
from kernels.chunked import LinearLogprob, LinearPolicyLoss
from kernels.coefficients import PolicySpec, Rows
from kernels.dispatch import resolve

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
    """fp32 ``[T]``, exp(new − old), the sequence's with ``ratio="sequence"``; 1 without old_logprobs."""
    clipped: Tensor
    """bool ``[T]``: the clipped branch of the loss was the smaller one."""
    clamped: Tensor
    """bool ``[T]``: a log-ratio that went into exp lay outside ±20."""


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
        bias: ``[V]`` fp32 or hidden's dtype; −inf masks a token out.
        anchor: ``[T]`` floating, a guess of each row's logsumexp for backends that scan without a running maximum;
            it changes the cost, never the result.
        return_entropy: also give −Σ p·log p.
        temperature: above 0, a number or ``[T]``; not differentiated.
        softcap: z ↦ softcap · tanh(z / softcap), before the temperature.
        ignore_index: rows with this target give 0 and take no gradient.
        workspace_gib: bound on scratch memory, GiB (at least one row of logits; 64 MiB without gradients).
        backend: ``"reference"`` or ``"cpu"``; None chooses by device.

    Returns:
        fp32 ``[T]`` in nats, or (log-probabilities, entropies).

    Raises:
        ValueError, TypeError: an argument's shape, dtype, device or value is wrong. Values of tensors are checked on
            the CPU, and on a GPU only under ``TANDEM_DEBUG=1``.
        RuntimeError: the backend asked for is not built.
    """
    check = Checker("linear_logprob")
    check_head(check, hidden, weight, targets, bias, temperature, softcap, ignore_index, workspace_gib)
    if anchor is not None:
        check.row("anchor", anchor, len(hidden), hidden.device)
    module = resolve("linear_logprob", hidden.device, backend)
    logprobs, entropy = LinearLogprob.apply(
        module, workspace_gib * GIB, softcap, hidden, weight, bias, targets, targets != ignore_index,
        _inverse_temperature(hidden, temperature),
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
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    workspace_gib: float = 1.25,
    backend: str | None = None,
) -> PolicyLossOutput:
    """Σ_t token_weights_t · loss_t of a policy given by a linear head, with its gradients made during the forward pass.

    The formulas, with their sources, are in :func:`kernels.coefficients.row_coefficients`. The caller puts the global
    normaliser into the weights, so that the gradient is the same for every split into microbatches and ranks. Rows
    whose coefficient is zero (ignored, clipped, zero advantage or weight) take no part in the gradient's products.
    The backward pass only multiplies by the upstream scalar, in place, and so runs once.

    Args:
        hidden, weight, targets, bias, temperature, softcap, ignore_index, workspace_gib, backend: as in
            :func:`linear_logprob`. Differentiable in hidden, weight and bias.
        advantages: ``[T]``; None with ``loss="likelihood"``.
        token_weights: ``[T]``.
        old_logprobs: ``[T]``, of the policy at the start of the update; needed by ``"clip"`` and ``is_cap``.
        ref_logprobs: ``[T]``, of the reference policy; needed by ``kl_coef``.
        behaviour_logprobs: ``[T]``, of the policy that sampled; used with ``is_cap``. Like all of these, a constant.
        loss: ``"clip"`` (PPO), ``"reinforce"`` or ``"likelihood"`` (SFT, best-of-K).
        clip_low, clip_high: the ratio is clipped to 1 − clip_low … 1 + clip_high.
        kl_coef: weight of the KL to the reference in the loss.
        kl_estimator: ``"k1"`` (with the gradient of the true KL), ``"k2"`` or ``"k3"``.
        entropy_coef: weight of the entropy bonus.
        is_cap: multiply policy and KL terms, not the entropy bonus, by min(exp(old − behaviour), is_cap).
        cu_seqlens: ``[sequences + 1]`` int32 or int64, bounds of the sequences in rows of ``hidden``.
        ratio: ``"token"``, or ``"sequence"`` for the ratios of whole sequences (needs ``cu_seqlens``).

    Returns:
        PolicyLossOutput: the loss and detached per-row metrics.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`linear_logprob`; RuntimeError also for a second backward pass.
    """
    check = Checker("linear_policy_loss")
    check_head(check, hidden, weight, targets, bias, temperature, softcap, ignore_index, workspace_gib)
    spec = PolicySpec(loss, clip_low, clip_high, kl_coef, kl_estimator, entropy_coef, is_cap, ratio)
    valid = targets != ignore_index
    rows = Rows(valid, token_weights, advantages, old_logprobs, ref_logprobs, behaviour_logprobs, lengths=None)
    check_policy(check, spec, rows, cu_seqlens)
    module = resolve("linear_policy_loss", hidden.device, backend)

    lengths = cu_seqlens.diff().long() if cu_seqlens is not None and ratio == "sequence" else None
    constants = Rows._make(None if value is None else value.detach().float() for value in rows)
    rows = constants._replace(valid=valid, lengths=lengths)
    wanted = [value is not None and value.requires_grad for value in (hidden, weight, bias)]
    needs = tuple(torch.is_grad_enabled() and want for want in wanted)
    outputs = LinearPolicyLoss.apply(
        module, workspace_gib * GIB, softcap, hidden, weight, bias, targets, _inverse_temperature(hidden, temperature),
        spec, rows, needs,
    )  # fmt: skip
    return PolicyLossOutput(*outputs)


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
        cu_seqlens: ``[sequences + 1]`` int32 or int64, the sequences' bounds; empty sequences are fine.
        gamma, lam: γ and λ, 0 to 1.
        bootstrap: ``[sequences]`` fp32, the value after each sequence's last token; zeros if None.
        backend: as in :func:`linear_logprob`.

    Returns:
        (advantages, returns), ``[T]`` fp32 without gradient.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`linear_logprob`.
    """
    check_gae(rewards, values, cu_seqlens, gamma, lam, bootstrap)
    module = resolve("gae", rewards.device, backend)
    with torch.no_grad():
        return module.gae(rewards, values, cu_seqlens, gamma, lam, bootstrap)


def _inverse_temperature(hidden: Tensor, temperature: float | Tensor) -> Tensor:
    """One fp32 factor a row."""
    if isinstance(temperature, Tensor):
        return temperature.detach().float().reciprocal()
    return torch.full((len(hidden),), 1 / temperature, dtype=torch.float32, device=hidden.device)
