"""Backend "reference": a chunk's logits in plain torch operations, on any device."""

import torch
from torch import Tensor

from kernels.head import Head, RowGradients, Statistics, linear_logits, product_dtype
from kernels.reference import gae

__all__ = ["bytes_per_row", "dlogits", "gae", "scan"]

LOG_FLOOR = -104.0
"""exp of this is zero in fp32: flooring log p here turns 0·(−inf) into 0 and changes nothing else."""


def bytes_per_row(hidden: Tensor, head: Head) -> int:
    """Logits and three temporaries of their size, and fp32 copies of the row of hidden and of its gradient."""
    vocabulary, width = head.weight.shape
    return 16 * vocabulary + 8 * width


def scan(hidden: Tensor, head: Head, targets: Tensor, logits: Tensor) -> Statistics:
    """See :class:`kernels.head.Backend`.

    The target's column is left out of the sum, so that nothing cancels as p → 1: with the other columns' maximum m and
    s = Σ exp(z − m), the odds against the target are exp(d), d = m + log s − z_y, and logp = −softplus(d).
    """
    linear_logits(hidden, head.weight, logits)
    if head.bias is not None:
        logits += head.bias.float()
    if head.softcap is not None:
        logits.div_(head.softcap).tanh_().mul_(head.softcap)
    logits *= head.inverse_temperature[:, None]

    index = targets[:, None]
    target_logits = logits.gather(1, index)
    logits.scatter_(1, index, float("-inf"))
    maximum = logits.amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)  # all others may be -inf
    shifted = logits - maximum
    others = shifted.exp()
    total = others.sum(1)
    weighted = others.mul_(shifted.clamp_(min=LOG_FLOOR)).sum(1)
    logits.scatter_(1, index, target_logits)

    log_odds = (maximum - target_logits).squeeze(1) + total.log()
    log_others = -torch.nn.functional.softplus(-log_odds)  # log of the others' share 1 − p
    logprobs = -torch.nn.functional.softplus(log_odds)
    # Σ −p·log p over the others, each term of one sign: log p = (z − m) − log s + log(1 − p).
    spread = total.log() - log_others - weighted / total
    entropy = torch.where(log_others > LOG_FLOOR, log_others.exp() * spread, 0.0)
    entropy -= logprobs.exp() * logprobs.clamp(min=LOG_FLOOR)
    log_total = (target_logits - maximum).squeeze(1) - logprobs
    return Statistics(logprobs, entropy, maximum.squeeze(1), log_total)


def dlogits(
    logits: Tensor, head: Head, targets: Tensor, rows: Tensor, statistics: Statistics, grads: RowGradients
) -> Tensor:
    """See :class:`kernels.head.Backend`: dz = c·(onehot − p) − g·p·(log p + H), the target's 1 − p exact."""
    logprobs, entropy, maximum, log_total, dlogprob, dentropy, scale = (
        value.index_select(0, rows)[:, None] for value in (*statistics, *grads, head.inverse_temperature)
    )
    logits, index = logits.index_select(0, rows), targets.index_select(0, rows)[:, None]
    log_p = (logits - maximum).sub_(log_total).scatter_(1, index, logprobs)
    result = log_p.exp()
    result *= log_p.clamp_(min=LOG_FLOOR).add_(entropy).mul_(-dentropy).sub_(dlogprob)
    entropy_part = -dentropy * logprobs.exp() * (logprobs.clamp(min=LOG_FLOOR) + entropy)
    result.scatter_(1, index, entropy_part - dlogprob * torch.expm1(logprobs))
    if head.softcap is not None:
        result *= logits.div_(scale * head.softcap).square_().neg_().add_(1)
    result *= scale
    return result.to(product_dtype(head.weight.dtype))
