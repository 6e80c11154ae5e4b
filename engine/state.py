"""What a run must remember, and checkpoints of it: written under another name, then renamed."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.distributed import World
    from engine.source import Batch
    from engine.training.trainer import Trainer


@dataclass
class OnlineTrainerState:
    """All but weights, optimizers and random generators; sampling and order follow from the seed and ``step``."""

    step: int = 0
    """Rollout batches trained on."""
    episode: int = 0
    """Responses trained on, over all ranks."""
    version: int = 0
    """Updates the policy has seen; samples carry the version that made them."""
    cursor: int = 0
    """Prompts taken from the stream."""
    kl_coef: float = 0.0
    """Current coefficient of the KL penalty."""
    best_metric: float | None = None
    """Best held-out accuracy (or mean reward) so far."""
    metric_before: float | None = None
    """The same before training."""
    seconds: float = 0.0
    """Time spent training, evaluations and checkpoints included, by earlier processes too."""
    tokens: int = 0
    """Prompt and response tokens trained on, over all ranks."""
    skipped: int = 0
    """Rollout batches in a row, up to the last, that had no response to train on."""
    learning_rates: dict[str, float] = field(default_factory=dict)
    """Of each model, in its last planned optimizer step."""
    world_size: int = 1
    base_models: dict[str, str] = field(default_factory=dict)
    """Digests of the models that training began with, by the setting that named them."""


def newest(run_dir: Path) -> Path | None:
    """The last complete checkpoint of a run, or None."""
    found = [path for path in (run_dir / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    found = [path for path in found if (path / "state.json").is_file() and (path / "state.json").stat().st_size]
    return max(found, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def read(checkpoint: Path) -> OnlineTrainerState:
    """The state in a checkpoint; imports no torch."""
    return OnlineTrainerState(**json.loads((checkpoint / "state.json").read_text()))


def save(
    run_dir: Path, state: OnlineTrainerState, trainer: Trainer, waiting: Sequence[Batch], world: World, keep: int
) -> Path:
    """Writes ``checkpoints/step-NNNNNN`` and removes all but the newest ``keep + 1``. Collective.

    The folder gets its name only when every rank has written its part: a kill at any moment leaves the last one good.
    ``waiting`` are this rank's batches that are sampled and not yet trained on.
    """
    import torch

    final = run_dir / "checkpoints" / f"step-{state.step:06d}"
    partial = final.with_name(f"partial-{final.name}")
    if world.main:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    world.barrier()
    for name, engine in trainer.engines.items():
        # What LoRA leaves frozen is in the model's own folder.
        engine.save_checkpoint(str(partial), tag=name, save_latest=False, exclude_frozen_parameters=True)
    torch.save(_random_state(), partial / f"random-{world.rank}.pt")
    torch.save(list(waiting), partial / f"in-flight-{world.rank}.pt")
    world.barrier()
    if world.main:
        (partial / "state.json").write_text(json.dumps(asdict(state), indent=1))
        if final.exists():
            shutil.rmtree(final)
        os.rename(partial, final)
        complete = sorted(path for path in final.parent.glob("step-*"))
        for old in complete[: -(keep + 1)]:
            shutil.rmtree(old)
    world.barrier()
    return final


def load(checkpoint: Path, trainer: Trainer, world: World) -> OnlineTrainerState:
    """Restores weights, optimizers, schedules and random generators; gives the state. Collective.

    Learning rates and optimizer settings are then those of the checkpoint (``Trainer.apply_settings``).
    """
    import torch

    for name, engine in trainer.engines.items():
        whole = all(parameter.requires_grad for parameter in engine.module.parameters())
        path, _ = engine.load_checkpoint(str(checkpoint), tag=name, load_module_strict=whole)
        if path is None:
            raise FileNotFoundError(f"{checkpoint} holds no '{name}'")
    _restore_random(torch.load(checkpoint / f"random-{world.rank}.pt", weights_only=False))
    return read(checkpoint)


def in_flight(checkpoint: Path, world: World) -> list[Batch]:
    """This rank's batches that were sampled and not yet trained on."""
    import torch

    batches: list[Batch] = torch.load(checkpoint / f"in-flight-{world.rank}.pt", weights_only=False)
    return batches


def _random_state() -> dict[str, object]:
    import random

    import numpy as np
    import torch

    state: dict[str, object] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random(state: dict) -> None:
    import random

    import numpy as np
    import torch

    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
