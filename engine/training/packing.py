"""Microbatches: sequences laid end to end in one row, filled up to a token budget, with no padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.machine.world import World
from engine.sample import Sample


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each of S packed sequences lies in a row of N tokens."""

    cu_seqlens: Tensor
    """[S + 1] int32, borders of the sequences; variable-length attention kernels take no other integers."""
    longest: int
    slots: Tensor
    """[N] int64, place of each token in an [S, longest] grid; what attention needs to see one sequence a row."""


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One forward pass: S sequences of N tokens, R of which predict a response token that the loss is of."""

    indices: list[int]
    """[S] which samples these are; empty if the pass does not count."""
    counts: bool
    """False for a pass that only keeps this rank in step with the others; its loss is multiplied by zero."""
    input_ids: Tensor
    """[1, N] int64."""
    position_ids: Tensor
    """[1, N] int64, starting from 0 in each sequence."""
    layout: Layout
    rows: Tensor
    """[R] int64, positions whose next token is a response token that the loss is of; only these reach the head."""
    targets: Tensor
    """[R] int64, those response tokens."""
    cu_seqlens: Tensor
    """[S + 1] int64 on the CPU, where chunks are planned by it: borders of the sequences among the R rows."""
    last: Tensor
    """[S] int64, position of each sequence's last token."""


def fill(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Groups sequences so that each group's lengths sum to at most ``budget``.

    Longest first: neighbours are of like length, which keeps the attention's grid full.

    Raises:
        ValueError: a sequence alone is longer than the budget.
    """
    groups: list[list[int]] = []
    room = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[index] > budget:
            raise ValueError(f"a sequence of {lengths[index]} tokens does not fit a microbatch of {budget} tokens")
        if lengths[index] > room:
            groups.append([])
            room = budget
        groups[-1].append(index)
        room -= lengths[index]
    return groups


def microbatches(samples: Sequence[Sample], units: Tensor, budget: int, world: World) -> list[Microbatch]:
    """Packs samples into passes, equally many on every rank. A collective call.

    A rank with fewer passes than another, perhaps with nothing to train on, makes up for them with a placeholder and
    ``counts=False``: ZeRO gathers and reduces in every pass, so a missing one would leave the other ranks waiting.

    Args:
        units: [U, n] which samples; those of a row stay side by side, in their order.
        budget: tokens of a pass at most.
    """
    rows = units.tolist()
    groups = fill([sum(samples[i].length for i in row) for row in rows], budget)
    chosen = [[i for unit in group for i in rows[unit]] for group in groups]
    batches = [pack([samples[i] for i in indices], indices, world.device) for indices in chosen]
    missing = int(world.max(len(groups))) - len(groups)
    return batches + [pack([_PLACEHOLDER] * units.shape[1], [], world.device) for _ in range(missing)]


_PLACEHOLDER = Sample(index=-1, group_id=-1, prompt_ids=[0], response_ids=[0])


def pack(chosen: Sequence[Sample], indices: list[int], device: torch.device) -> Microbatch:
    """One pass over the given samples; ``indices`` say which of a rank's they are, none for a placeholder."""
    ids = [token for sample in chosen for token in (*sample.prompt_ids, *sample.response_ids)]
    lengths = torch.tensor([sample.length for sample in chosen])
    prompts = torch.tensor([len(sample.prompt_ids) for sample in chosen])
    ends = lengths.cumsum(0)
    starts = ends - lengths
    sequence = torch.repeat_interleave(torch.arange(len(chosen)), lengths)
    position = torch.arange(len(ids)) - starts[sequence]
    predicts = (position >= prompts[sequence] - 1) & (position < lengths[sequence] - 1)
    if any(sample.loss_mask is not None for sample in chosen):
        predicts &= _in_loss(chosen)
    rows = predicts.nonzero()[:, 0]
    input_ids = torch.tensor(ids)
    longest = int(lengths.max())
    zero = torch.zeros(1, dtype=torch.int64)
    return Microbatch(
        indices=indices,
        counts=bool(indices),
        input_ids=input_ids[None].to(device),
        position_ids=position[None].to(device),
        layout=Layout(
            torch.cat([zero, ends]).to(device, torch.int32), longest, (sequence * longest + position).to(device)
        ),
        rows=rows.to(device),
        targets=input_ids[rows + 1].to(device),
        cu_seqlens=torch.cat([zero, torch.tensor([sample.loss_tokens for sample in chosen]).cumsum(0)]),
        last=(ends - 1).to(device),
    )


def _in_loss(chosen: Sequence[Sample]) -> Tensor:
    """[N] bool, where the next token of a packed row is one that its sample's loss is of."""
    parts = []
    for sample in chosen:
        part = torch.ones(sample.length, dtype=torch.bool)
        if sample.loss_mask is not None:
            part[len(sample.prompt_ids) - 1 : -1] = torch.from_numpy(sample.loss_mask)
        parts.append(part)
    return torch.cat(parts)
