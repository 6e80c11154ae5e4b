"""What the policy, or the reward model, makes of held-out rows: the algorithm's loss on them, with no gradient."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from algorithms.rollout import Objective, global_mean, global_stderr, sequence_sums
from engine.sample import Sample
from engine.training.backward import loss_arguments, measured_pairs, measured_scores, score_losses
from engine.training.packing import Microbatch, microbatches
from engine.training.token_store import TokenStore
from engine.training.trainer import Trainer

Totals = dict[str, tuple[Tensor, Tensor]]
"""By name, of each of U rows the sum of what is averaged, [U] fp64, and of how many elements, [U] fp64."""


@torch.no_grad()
def measure(trainer: Trainer, samples: Sequence[Sample], ref: Tensor | None, objective: Objective) -> dict[str, float]:
    """The objective's loss over all ranks' samples as ``eval/loss``, and what people read it by. Collective.

    Of a likelihood that is ``eval/perplexity``, exp of the loss, and ``eval/token_accuracy``, the share of tokens that
    are the policy's most likely ones; of pairs, what ``policy/...`` or ``reward_model/...`` has while training. Beside
    each its standard error over rows, ``..._stderr``, where there are several.

    Args:
        samples: this rank's; it may have none, though not every rank.
        ref: [T] fp32, nats, of the frozen reference, where the loss takes it.
    """
    world, store = trainer.world, TokenStore(samples)
    parts: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    trainer.policy.eval()
    for batch in microbatches(samples, objective.units, trainer.config.train.tokens_per_microbatch, world):
        row = {} if ref is None else {"ref_logprobs": store.take(ref, batch)}
        for name, totals in _totals(trainer, batch, samples, row, objective).items():
            parts[name].append(totals)
    found: dict[str, float] = {}
    for name, of_batches in parts.items():
        values, sizes = map(torch.cat, zip(*of_batches, strict=True))
        found[f"eval/{name}"] = global_mean(values, world.sum, sizes)
        if (stderr := global_stderr(values, world.sum, sizes)) is not None:
            found[f"eval/{name}_stderr"] = stderr
    if not objective.compares_pairs:
        _add_perplexity(found)
    return found


def _totals(
    trainer: Trainer, batch: Microbatch, samples: Sequence[Sample], row: dict[str, Tensor], objective: Objective
) -> Totals:
    """Of a microbatch's rows, or none of a placeholder's, which is passed through the model all the same."""
    lengths = batch.cu_seqlens.diff()
    if objective.score_loss is not None:
        losses, chosen, rejected = score_losses(trainer.policy, batch, samples, objective)
        by_row = {"loss": losses} | measured_scores(chosen, rejected)
    else:
        weight = objective.normalise(lengths.to(batch.rows.device)).terms
        arguments = loss_arguments(batch, weight, row, objective, trainer.config.train)
        likelihood = not objective.compares_pairs
        outputs = trainer.policy(batch, arguments, most_likely=likelihood, **trainer.head_options)
        if likelihood:
            *_, losses, right = outputs
            by_row = {
                name: sequence_sums(tokens.double().cpu(), batch.cu_seqlens)
                for name, tokens in (("loss", losses), ("token_accuracy", right))
            }
        else:
            by_row = {"loss": outputs[-1]} | measured_pairs(outputs)
    rows = lengths.view(-1, objective.units.shape[1])
    counted = slice(len(rows) * batch.counts)
    sizes = {name: torch.ones(len(rows), dtype=torch.float64) for name in by_row}
    if not objective.compares_pairs:
        sizes["token_accuracy"] = lengths.double()
    sizes["loss"] = torch.stack([objective.normalise(row).divisor for row in rows])
    return {name: (values.double().cpu()[counted], sizes[name][counted]) for name, values in by_row.items()}


def _add_perplexity(found: dict[str, float]) -> None:
    """exp of the loss, whose standard error is the loss's times it (the delta method)."""
    found["eval/perplexity"] = math.exp(min(found["eval/loss"], 700.0))
    if (stderr := found.get("eval/loss_stderr")) is not None:
        found["eval/perplexity_stderr"] = found["eval/perplexity"] * stderr
