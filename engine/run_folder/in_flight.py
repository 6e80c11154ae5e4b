"""The part of a checkpoint that holds the batches which were sampled and not yet trained on.

Stored are numbers, text and tensors, and no class of ours by its path, so that the code may move. A sample's row of the
data set, in which there may be objects of any kind, is left out, and found again among the prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine.sample import Sample

if TYPE_CHECKING:
    from engine.machine.world import World
    from engine.rollouts.row_source import RowSource
    from engine.rollouts.source import Batch, Source


def name(rank: int) -> str:
    """The file of a rank."""
    return f"in-flight-{rank}.pt"


def write(checkpoint: Path, batches: Sequence[Batch], world: World) -> None:
    """Writes this rank's batches into a checkpoint's folder."""
    stored = [_stored(batch) | {"samples": [_stored(sample) for sample in batch.samples]} for batch in batches]
    torch.save(stored, checkpoint / name(world.rank))


def read(checkpoint: Path, world: World, source: Source | RowSource) -> list[Batch]:
    """This rank's batches, their rows of the data set from ``source``."""
    from engine.rollouts.source import Batch

    batches = []
    for stored in torch.load(checkpoint / name(world.rank), weights_only=True):
        samples = [
            Sample(**one | {"behaviour_logprobs": one["behaviour_logprobs"].numpy()}) for one in stored["samples"]
        ]
        for sample in samples:
            sample.columns = source.columns(stored["first"] + sample.group_id)
        batches.append(Batch(**stored | {"samples": samples}))
    return batches


def _stored(record: Batch | Sample) -> dict[str, Any]:
    kept = {field.name: getattr(record, field.name) for field in fields(record) if field.name != "columns"}
    return {key: torch.from_numpy(value) if key == "behaviour_logprobs" else value for key, value in kept.items()}
