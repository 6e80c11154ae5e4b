"""Backend "reference": a chunk's logits in plain torch operations, on any device."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.chunked import even_spans
from kernels.head import Gradients, Head, Needs, RowGradients, product_dtype
from kernels.logits import CAST_BYTES, HeadGradients, LogitsScanner, LogitStatistics, linear_logits
from kernels.reference import add_rms_norm, gae

__all__ = ["add_rms_norm", "gae", "linear_kl", "linear_kl_backward", "make_scanner"]

LOG_FLOOR = -104.0
"""exp of this is zero in fp32: flooring log p here turns 0·(−inf) into 0 and changes nothing else."""


def shaped_logits(hidden: Tensor, head: Head, out: Tensor) -> Tensor:
    """Fill ``out [n, V]`` with z."""
    linear_logits(hidden, head.weight, out)
    if head.bias is not None:
        out += head.bias.float()
    if head.softcap is not None:
        out.div_(head.softcap).tanh_().mul_(head.softcap)
    out *= head.inverse_temperature[:, None]
    return out


def through_shape(dlogits: Tensor, logits: Tensor, head: Head, scale: Tensor) -> Tensor:
    """From the gradient by z to that by hidden·weightᵀ; uses both up. ``scale``: the rows' inverse temperatures."""
    if head.softcap is not None:
        dlogits *= logits.div_(scale * head.softcap).square_().neg_().add_(1)
    dlogits *= scale
    return dlogits.to(product_dtype(head.weight.dtype))


class EagerScanner(LogitsScanner):
    """See :class:`kernels.logits.LogitsScanner`."""

    @staticmethod
    def bytes_per_row(hidden: Tensor, head: Head) -> int:
        """Logits and three temporaries of their size, and fp32 copies of the row of hidden and of its gradient."""
        vocabulary, width = head.weight.shape
        return 16 * vocabulary + 8 * width

    @staticmethod
    def statistics(hidden: Tensor, head: Head, targets: Tensor, logits: Tensor) -> LogitStatistics:
        """See :class:`kernels.logits.LogitsScanner`.

        The target's column is left out of the sum, so that nothing cancels as p → 1: with the other columns' maximum m
        and s = Σ exp(z − m), the odds against the target are exp(d), d = m + log s − z_y, and logp = −softplus(d).
        """
        shaped_logits(hidden, head, logits)
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
        log_total = torch.logaddexp(total.log(), (target_logits - maximum).squeeze(1))
        return LogitStatistics(logprobs, entropy, maximum.squeeze(1), log_total)

    @staticmethod
    def dlogits(
        logits: Tensor, head: Head, targets: Tensor, rows: Tensor, statistics: LogitStatistics, grads: RowGradients
    ) -> Tensor:
        """dz = c·(onehot − p) − g·p·(log p + H), the target's 1 − p exact."""
        logprobs, entropy, maximum, log_total, dlogprob, scale = (
            value.index_select(0, rows)[:, None] for value in (*statistics, grads.dlogprob, head.inverse_temperature)
        )
        logits, index = logits.index_select(0, rows), targets.index_select(0, rows)[:, None]
        log_p = (logits - maximum).sub_(log_total).scatter_(1, index, logprobs)
        result = log_p.exp()
        at_target = -dlogprob * torch.expm1(logprobs)
        if grads.dentropy is None:
            result *= -dlogprob
        else:
            dentropy = grads.dentropy.index_select(0, rows)[:, None]
            result *= log_p.clamp_(min=LOG_FLOOR).add_(entropy).mul_(-dentropy).sub_(dlogprob)
            at_target -= dentropy * logprobs.exp() * (logprobs.clamp(min=LOG_FLOOR) + entropy)
        result.scatter_(1, index, at_target)
        return through_shape(result, logits, head, scale)


make_scanner = EagerScanner


class _Pair(NamedTuple):
    """Two heads' distributions over a chunk: logits of p, log p and log q, and the chunk's part of p's head."""

    logits_p: Tensor
    log_p: Tensor
    log_q: Tensor
    lse_p: Tensor
    lse_q: Tensor
    head_p: Head


def _scan_pair(hidden_p: Tensor, head_p: Head, hidden_q: Tensor, head_q: Head, rows: slice) -> _Pair:
    shape = rows.stop - rows.start, len(head_p.weight)
    found = []
    for hidden, head in ((hidden_p, head_p), (hidden_q, head_q)):
        part = head._replace(inverse_temperature=head.inverse_temperature[rows])
        logits = shaped_logits(hidden[rows], part, hidden.new_empty(shape, dtype=torch.float32))
        # In two parts: a logsumexp of 200 in one would leave its own rounding in log p − log q.
        maximum = logits.amax(1, keepdim=True)
        shifted = logits - maximum
        log_total = shifted.exp().sum(1, keepdim=True).log_()
        found.append((logits, shifted.sub_(log_total), (maximum + log_total).squeeze(1), part))
    (logits_p, log_p, lse_p, part_p), (_, log_q, lse_q, _) = found
    return _Pair(logits_p, log_p, log_q, lse_p, lse_q, part_p)


def _divergence(log_a: Tensor, log_b: Tensor) -> Tensor:
    """KL(a‖b) = Σ a·d, d = log a − log b, of each row.

    Summed as Σ (a·d − a + b), whose terms have one sign: an error common to all d then cancels between Σa and Σb, and
    nearly equal distributions keep their digits. d + expm1(−d) is a small d's term over a.
    """
    a, difference = log_a.exp(), log_a - log_b
    terms = difference.neg().expm1_().add_(difference).mul_(a)
    far = (a * difference).sub_(a).add_(log_b.exp())
    terms = torch.where(difference.abs_() < 1, terms, far)
    terms = torch.where(log_a == float("-inf"), log_b.exp(), terms)
    impossible = (log_b == float("-inf")) & (log_a > float("-inf"))
    return terms.masked_fill_(impossible, float("inf")).sum(1).clamp_(min=0)


def _pair_spans(hidden_p: Tensor, hidden_q: Tensor, vocabulary: int, workspace: float) -> list[slice]:
    """Chunks: nine tensors of a chunk's logits are alive in :func:`_divergence`, and fp32 copies of hidden states."""
    bytes_per_row = 36 * vocabulary + 8 * hidden_p.shape[1] + 4 * hidden_q.shape[1]
    cast = 0 if hidden_p.dtype == hidden_q.dtype == torch.float32 else CAST_BYTES
    chunk_rows = max(1, int(workspace - cast) // bytes_per_row)
    return [span.rows for span in even_spans(len(hidden_p), chunk_rows)]


def linear_kl(
    hidden_p: Tensor, head_p: Head, hidden_q: Tensor, head_q: Head, direction: str, workspace: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See :class:`kernels.head.Backend`."""
    parts = []
    for rows in _pair_spans(hidden_p, hidden_q, len(head_p.weight), workspace):
        pair = _scan_pair(hidden_p, head_p, hidden_q, head_q, rows)
        logs = (pair.log_p, pair.log_q) if direction == "reverse" else (pair.log_q, pair.log_p)
        parts.append((_divergence(*logs), pair.lse_p, pair.lse_q))
    kl, lse_p, lse_q = map(torch.cat, zip(*parts, strict=True))
    return kl, lse_p, lse_q


def linear_kl_backward(
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
    """See :class:`kernels.head.Backend`: dz = g·p·(log p − log q − KL), or g·(p − q) forward.

    The KL and the logsumexps are for backends that scan with an anchor; here they would only add their rounding.
    """
    spans = _pair_spans(hidden_p, hidden_q, len(head_p.weight), workspace)
    gradients = HeadGradients(hidden_p, head_p, needs, len(spans))
    for rows in spans:
        live = (dkl[rows] != 0).nonzero().squeeze(1)
        if not len(live):
            continue
        logits, log_p, log_q, _, _, part = _scan_pair(hidden_p, head_p, hidden_q, head_q, rows)
        if direction == "reverse":
            p, top = log_p.exp(), log_p.argmax(1, keepdim=True)
            difference = log_p.sub_(log_q).masked_fill_(p == 0, 0)
            # Measured from the likeliest token's, whose own difference from KL would cancel as its p → 1.
            difference -= difference.gather(1, top)
            dlogits = difference.sub_((p * difference).sum(1, keepdim=True)).mul_(p)
        else:
            p, top = log_p.exp(), log_p.argmax(1, keepdim=True)
            dlogits, chance = p - log_q.exp_(), p.gather(1, top)
            # The row sums to 0: the likeliest token's is what the others' leave, as its own cancels where both p → 1.
            held = dlogits.gather(1, top)
            others = dlogits.scatter_(1, top, 0).sum(1, keepdim=True)
            dlogits.scatter_(1, top, held * (1 - chance) - others * chance)
        dlogits *= dkl[rows, None]
        dlogits = through_shape(dlogits, logits, part, part.inverse_temperature[:, None])
        gradients.add(live + rows.start, dlogits.index_select(0, live))
    return gradients.finish()
