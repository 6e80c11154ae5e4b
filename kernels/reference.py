"""The same functions in plain eager torch: whole logits, any dtype, gradients by autograd.

This is the oracle that the backends are tested against (in fp64), and the shortest statement of what they compute.
Arguments are as in :mod:`kernels.api`; nothing is checked.
"""

from itertools import pairwise

import torch
from torch import Tensor

from kernels.token_losses import LOG_RATIO_LIMIT


def _log_softmax(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float | Tensor, softcap: float | None
) -> Tensor:
    logits = hidden @ weight.t()
    if bias is not None:
        logits = logits + bias
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if isinstance(temperature, Tensor):
        temperature = temperature[:, None]
    return torch.log_softmax(logits / temperature, 1)


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    return_entropy: bool = False,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
) -> Tensor | tuple[Tensor, Tensor]:
    """log p of each target, and the entropy −Σ p·log p; see :func:`kernels.linear_logprob`."""
    logp = _log_softmax(hidden, weight, bias, temperature, softcap)
    valid = targets != ignore_index
    logprobs = logp.gather(1, torch.where(valid, targets, 0)[:, None]).squeeze(1).masked_fill(~valid, 0)
    if not return_entropy:
        return logprobs
    possible = logp != float("-inf")  # 0·(−inf) is 0 here, and so is its gradient
    entropy = -(logp.exp() * logp.where(possible, 0)).sum(1)
    return logprobs, entropy.masked_fill(~valid, 0)


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
) -> Tensor:
    """Σ token_weights · loss; see :func:`kernels.linear_policy_loss`."""
    pair = linear_logprob(
        hidden, weight, targets, bias=bias, return_entropy=True, temperature=temperature, softcap=softcap,
        ignore_index=ignore_index,
    )  # fmt: skip
    new, entropy = pair
    valid = targets != ignore_index
    # What an ignored row holds must not reach the gradient, where 0·NaN is NaN.
    token_weights = token_weights.masked_fill(~valid, 0)
    advantages, old_logprobs, ref_logprobs, behaviour_logprobs = (
        None if value is None else value.masked_fill(~valid, 0)
        for value in (advantages, old_logprobs, ref_logprobs, behaviour_logprobs)
    )

    def exp_ratio(log_ratio: Tensor, of: str) -> Tensor:
        if of != "token":
            assert cu_seqlens is not None
            parts = []
            for a, b in pairwise(cu_seqlens.tolist()):
                tokens = valid[a:b].sum().clamp(min=1) if of == "sequence_mean" else 1
                parts.append((log_ratio[a:b].sum() / tokens).expand(b - a))
            log_ratio = torch.cat(parts) if parts else log_ratio
        return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()

    if old_logprobs is None:
        old_logprobs = new.detach()
    if loss == "clip":
        assert advantages is not None
        r = exp_ratio(new - old_logprobs, ratio)
        objective = torch.minimum(r * advantages, r.clamp(1 - clip_low, 1 + clip_high) * advantages)
        if dual_clip is not None:
            objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
        row_loss = -objective
    elif loss == "cispo":
        assert advantages is not None
        r = exp_ratio(new - old_logprobs, ratio)
        row_loss = -r.clamp(1 - clip_low, 1 + clip_high).detach() * advantages * new
    elif loss == "reinforce":
        assert advantages is not None
        row_loss = -advantages * new
    else:
        row_loss = -new
    if ref_logprobs is not None and kl_coef > 0:
        delta = new - ref_logprobs
        if kl_estimator == "k1":  # the value of k1, the gradient δ·∇new of the true KL
            kl = delta.detach() + delta.detach() * (new - new.detach())
        elif kl_estimator == "k2":
            kl = delta.square() / 2
        else:
            kl = exp_ratio(-delta, "token") - 1 + delta
        row_loss = row_loss + kl_coef * kl
    if behaviour_logprobs is not None and is_cap is not None:
        row_loss = row_loss * exp_ratio(old_logprobs - behaviour_logprobs, ratio).clamp(max=is_cap)
    return (token_weights * (row_loss - entropy_coef * entropy)).sum()


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
) -> Tensor:
    """Σ pair_weights · loss; see :func:`kernels.linear_preference_loss`."""
    new = linear_logprob(
        hidden, weight, targets, bias=bias, temperature=temperature, softcap=softcap, ignore_index=ignore_index
    )
    assert isinstance(new, Tensor)
    log_ratio = new - ref_logprobs.masked_fill(targets == ignore_index, 0)
    sums = [log_ratio[a:b].sum() for a, b in pairwise(cu_seqlens.tolist())]
    total = new.new_zeros(())
    for pair_weight, chosen, rejected in zip(pair_weights, sums[0::2], sums[1::2], strict=True):
        margin = chosen - rejected
        if loss == "sigmoid":
            right, wrong = torch.nn.functional.logsigmoid(torch.stack((beta * margin, -beta * margin)))
            pair_loss = -(1 - label_smoothing) * right - label_smoothing * wrong
        elif loss == "ipo":
            pair_loss = (margin - 1 / (2 * beta)) ** 2
        else:
            pair_loss = (1 - beta * margin).clamp(min=0)
        total = total + pair_weight * pair_loss
    return total


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
) -> Tensor:
    """KL(p‖q), or KL(q‖p) with ``"forward"``, of each row; see :func:`kernels.linear_kl`."""
    log_p = _log_softmax(hidden_p, weight_p, bias_p, temperature, softcap)
    log_q = _log_softmax(hidden_q, weight_q, bias_q, temperature, softcap).to(log_p.dtype).detach()
    log_a, log_b = (log_p, log_q) if direction == "reverse" else (log_q, log_p)
    possible = log_a != float("-inf")
    return (log_a.exp() * torch.where(possible, log_a.where(possible, 0) - log_b.where(possible, 0), 0)).sum(1)


def gae(
    rewards: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    gamma: float,
    lam: float,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See :func:`kernels.gae`. All sequences step back through time together."""
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    advantages = torch.zeros_like(rewards)
    next_value = rewards.new_zeros(len(lengths)) if bootstrap is None else bootstrap
    next_advantage = torch.zeros_like(next_value)
    for step in range(int(lengths.max()) if len(lengths) else 0):
        alive = (step < lengths).nonzero().squeeze(1)
        index = (starts + lengths - 1 - step)[alive]
        delta = rewards[index] + gamma * next_value[alive] - values[index]
        next_advantage[alive] = delta + gamma * lam * next_advantage[alive]
        advantages[index] = next_advantage[alive]
        next_value = next_value.index_copy(0, alive, values[index])
    return advantages, advantages + values


def add_rms_norm(residual: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See :func:`kernels.add_rms_norm`."""
    total = residual if branch is None else residual + branch
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * weight
    return total, normed.to(weight.dtype)
