"""Whether a model, run as the trainer runs it, still computes what transformers computes: asked of the model itself.

The trainer packs several sequences into one row, with its own attention, and never makes logits. A model may ignore the
borders between sequences (state-space layers, convolutions, attention of its own), scale or cap its logits, or put more
between its last layer and its head than a product. No list of model kinds can keep up with that; two short sequences of
random tokens tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.config import ConfigError
from engine.config.quoted import kind_and_words
from engine.sample import Sample
from engine.training import attention
from engine.training.packing import Microbatch, pack

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from engine.training.models import Policy

LENGTHS = (33, 21)
"""Tokens of the two sequences: longer than the windows of small models."""
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.08, torch.float16: 0.03}
"""Largest mean difference to transformers' own values, in units of their spread: what rounding in these numbers stays
below, and what another computation goes far beyond."""


@dataclass(frozen=True, slots=True)
class Own:
    """What transformers' own forward pass gives for two sequences, each by itself."""

    samples: list[Sample]
    values: list[Tensor]
    """Of each: fp32 log-probabilities of its response tokens, in nats, or its score, [1]."""
    spread: float
    """How far values of other tokens or sequences are apart: what a difference is measured by."""


def own_logprobs(model: PreTrainedModel, name: str) -> Own:
    """Log-probabilities by a causal model, with transformers' own attention and head.

    Args:
        name: the setting and the model, for messages.

    Raises:
        ConfigError: transformers itself cannot run the model.
    """
    samples = _sequences(model.config)
    rows = [logits[0, :-1].float().log_softmax(-1) for logits in _logits(model, samples, name)]
    targets = [torch.tensor(one.response_ids, device=model.device) for one in samples]
    values = [row.gather(1, target[:, None])[:, 0] for row, target in zip(rows, targets, strict=True)]
    return Own(samples, values, float(torch.cat(rows).std(dim=1).mean()))


def own_scores(model: PreTrainedModel, name: str) -> Own:
    """Scores by a sequence classifier with one label, likewise; they are read at the last token."""
    samples = _sequences(model.config)
    values = [logits[0].float() for logits in _logits(model, samples, name)]
    return Own(samples, values, float(torch.cat(values).abs().mean()) + torch.finfo(torch.float32).tiny)


def check_policy(policy: Policy, own: Own, name: str) -> None:
    """Compares the log-probabilities of both sequences in one packed row with transformers' own.

    Raises:
        ConfigError: they differ by more than rounding, or depend on the sequence beside them, or the model cannot be
            run this way.
    """
    # The head's eager backend: its kernels have tests of their own, and take seconds to compile.
    _check(policy.model, lambda batch: policy(batch, backend="reference"), own, name)


def check_scores(model: PreTrainedModel, scores: Callable[[Microbatch], Tensor], own: Own, name: str) -> None:
    """The same of a sequence classifier's scores at the last tokens, as our head gives them."""
    _check(model, scores, own, name)


def _sequences(config: Any) -> list[Sample]:
    """Two sequences of random tokens of the vocabulary, special ones left out: a prompt of one token and a response."""
    config = config.get_text_config()
    special = {getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos")}
    usual = [token for token in range(config.vocab_size) if token not in special] or [0]
    longest = getattr(config, "max_position_embeddings", None) or max(LENGTHS)
    generator = torch.Generator().manual_seed(0)
    samples = []
    for i, length in enumerate(LENGTHS):
        ids = [usual[i] for i in torch.randint(len(usual), (min(length, longest),), generator=generator).tolist()]
        samples.append(Sample(i, i, prompt_ids=ids[:1], response_ids=ids[1:]))
    return samples


@torch.no_grad()
def _logits(model: PreTrainedModel, samples: Sequence[Sample], name: str) -> list[Tensor]:
    rows = [torch.tensor([one.prompt_ids + one.response_ids], device=model.device) for one in samples]
    try:
        logits = [model(input_ids=ids, use_cache=False).logits for ids in rows]
    except Exception as error:
        raise ConfigError(
            f"{name} ({type(model).__name__}): transformers cannot run it: {kind_and_words(error, longest=200)}"
        ) from error
    _must_be_numbers(logits, model, name)
    return logits


def _must_be_numbers(logits: Sequence[Tensor], model: PreTrainedModel, name: str) -> None:
    if not all(row.isfinite().any() and not row.isnan().any() for row in logits):
        raise ConfigError(
            f"{name} ({type(model).__name__}) gives outputs that are not numbers: its weights hold NaN or infinities"
        )


def _check(model: Any, run: Callable[[Microbatch], Tensor], own: Own, name: str) -> None:
    kind = f"{name} ({type(model).__name__}) cannot be used here"
    try:
        calls = attention.calls
        values, leak = _packed_values(model, run, own)
    except Exception as error:
        raise ConfigError(
            f"{kind}: its forward pass does not take packed sequences: {kind_and_words(error, longest=200)}"
        ) from error
    if leak:
        raise ConfigError(
            f"{kind}: what it computes for a sequence depends on the other sequences in a packed row, because its "
            "layers ignore where a sequence begins; take a model whose attention transformers' attention interface can "
            "replace"
        )
    if attention.calls == calls:
        raise ConfigError(
            f"{kind}: it has attention of its own, which may have no place for a packed row; take a model whose "
            "attention transformers' attention interface can replace"
        )
    gap = float((values - torch.cat(own.values)).abs().mean()) / own.spread
    if not gap <= LIMITS[next(model.parameters()).dtype]:
        raise ConfigError(
            f"{kind}: packed into a row and with Tandem's head it gives other values than transformers does (by "
            f"{gap * own.spread:.2g} on average): it may scale its outputs or have more than a product in its head"
        )


def _packed_values(model: Any, run: Callable[[Microbatch], Tensor], own: Own) -> tuple[Tensor, bool]:
    """The values of both sequences in one row, and whether those of one depend on the tokens of the other.

    That is read off gradients, which are exactly zero where nothing depends, whatever the rounding.
    """
    embeddings: list[Tensor] = []

    def keep(module: Any, inputs: Any, output: Tensor) -> Tensor:
        embeddings.append(output.detach().requires_grad_())
        return embeddings[-1].clone()  # a model may write to it

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hook = model.get_input_embeddings().register_forward_hook(keep)
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        with torch.enable_grad():
            values = run(pack(own.samples, [0, 1], model.device)).float()
            first, second = values.split([len(part) for part in own.values])
            border = own.samples[0].length
            from_first = torch.autograd.grad(second.sum(), embeddings[0], retain_graph=True)[0].flatten(0, -2)[:border]
            from_second = torch.autograd.grad(first.sum(), embeddings[0])[0].flatten(0, -2)[border:]
    finally:
        hook.remove()
        for parameter in trained:
            parameter.requires_grad_(True)
    return values.detach(), bool(from_first.any() or from_second.any())
