"""What a run must remember, and checkpoints of it: written under another name, then renamed."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.machine import disk
from engine.report import records

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.machine.world import World
    from engine.rollouts.source import Batch
    from engine.training.trainer import Trainer

STATE = "state.json"
FORMAT = 2
"""Of a checkpoint's files; one of another form is not read. 1 had the batches in flight by their classes' paths."""


@dataclass
class OnlineTrainerState:
    """All but weights, optimizers and random generators; sampling and order follow from the seed and ``step``."""

    step: int = 0
    """Batches trained on."""
    episode: int = 0
    """Responses trained on, over all ranks."""
    version: int = 0
    """Updates the policy has seen; samples carry the version that made them."""
    cursor: int = 0
    """Prompts or rows taken from the stream."""
    kl_coef: float = 0.0
    """Current coefficient of the KL penalty."""
    best_metric: float | None = None
    """Best held-out accuracy (or mean reward, or loss) so far."""
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
    """The last checkpoint of a run that is whole, or None."""
    whole = [path for path in _named(run_dir) if not fault(path)]
    return whole[-1] if whole else None


def torn(run_dir: Path) -> list[str]:
    """One line for each checkpoint that would be newer than ``newest`` but is not whole, the last one first."""
    lines: list[str] = []
    for path in reversed(_named(run_dir)):
        if not (found := fault(path)):
            break
        lines.append(f"{path} is left out: {found}")
    return lines


def read(checkpoint: Path) -> OnlineTrainerState:
    """The state in a checkpoint that ``newest`` found; imports no torch."""
    found = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    return OnlineTrainerState(**{key: value for key, value in found.items() if key not in ("files", "format")})


def _named(run_dir: Path) -> list[Path]:
    """The folders that have a checkpoint's name, in order of their steps; everything else there is somebody's own."""
    found = [path for path in (run_dir / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d{6,}", path.name)]
    return sorted((path for path in found if path.is_dir() and not path.is_symlink()), key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def fault(checkpoint: Path) -> str:
    """Why a folder of that name is no whole checkpoint; empty for one that is."""
    try:
        found = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"it has no {STATE}"
    except (OSError, ValueError):
        return f"its {STATE} is torn"
    if not isinstance(found, dict) or not isinstance(files := found.pop("files", None), dict):
        return f"its {STATE} lists no files, as another version of Tandem wrote it"
    if found.pop("format", 1) != FORMAT:
        return f"its {STATE} was written by another version of Tandem, in a form that this one does not read"
    known = {one.name for one in fields(OnlineTrainerState)}
    if different := sorted(known ^ found.keys()):
        return f"its {STATE} was written by another version of Tandem: {different[0]} is in one of both"
    if found["step"] != _step(checkpoint):
        return f"its {STATE} is of step {found['step']}"
    for name, size in files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes of {size}"
        if disk.holds_zeros(path):
            return f"{name} holds zeros in place of its content"
    return ""


def save(
    run_dir: Path, state: OnlineTrainerState, trainer: Trainer, waiting: Sequence[Batch], world: World, keep: int
) -> Path:
    """Writes ``checkpoints/step-NNNNNN`` and removes all but the newest ``keep + 1``. Collective.

    The folder gets its name only when every rank has written its part and the disk has it: a kill or a power cut at any
    moment leaves the last one good. Only whole checkpoints count and are removed; what has the new one's name without
    being one is renamed.
    ``waiting`` are this rank's batches that are sampled and not yet trained on.

    Raises:
        disk.WriteFailed: it cannot be written, and what there was of it is removed.
    """
    final = run_dir / "checkpoints" / f"step-{state.step:06d}"
    partial = final.with_name(f"partial-{final.name}")
    with disk.writing(final, lambda: _remove_part(partial, world)):
        _write(partial, state, trainer, waiting, world)
        if world.main:
            if fault(final) == "" and not final.is_symlink():
                shutil.rmtree(final)
            elif os.path.lexists(final):
                os.rename(final, _free_name(final))
            os.rename(partial, final)
            disk.flush(final.parent)
            whole = [path for path in _named(run_dir) if not fault(path)]
            for old in whole[: -(keep + 1)]:
                shutil.rmtree(old)
    world.barrier()
    return final


def _write(partial: Path, state: OnlineTrainerState, trainer: Trainer, waiting: Sequence[Batch], world: World) -> None:
    import torch

    from engine.run_folder import in_flight

    if world.main:
        disk.clear(partial)  # of a run that was killed while it wrote
        partial.mkdir(parents=True)
    world.barrier()
    for name, engine in trainer.engines.items():
        # What LoRA leaves frozen is in the model's own folder.
        engine.save_checkpoint(str(partial), tag=name, save_latest=False, exclude_frozen_parameters=True)
    torch.save(_random_state(), partial / f"random-{world.rank}.pt")
    in_flight.write(partial, waiting, world)
    world.barrier()
    if world.main:
        files = {str(path.relative_to(partial)): path.stat().st_size for path in partial.rglob("*") if path.is_file()}
        text = json.dumps(asdict(state) | {"format": FORMAT, "files": files}, indent=1)
        records.write_atomically(partial / STATE, text)
        disk.flush(*partial.rglob("*"), partial)


def _remove_part(partial: Path, world: World) -> None:
    """Rank 0 removes the whole folder; another one its own files, so that there is room to say what happened."""
    from engine.run_folder import in_flight

    if world.main:
        disk.remove(partial)
        return
    for pattern in (f"random-{world.rank}.pt", in_flight.name(world.rank), f"*pp_rank_{world.rank}_*"):
        for path in [] if partial.is_symlink() else partial.rglob(pattern):
            disk.empty(path)
            path.unlink()


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"not-a-checkpoint-{number}-{path.name}") for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


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
    _restore_random(torch.load(checkpoint / f"random-{world.rank}.pt", weights_only=True))
    return read(checkpoint)


def _random_state() -> dict[str, object]:
    import random

    import numpy as np
    import torch

    legacy: Any = np.random.get_state()
    kind, keys, *rest = legacy
    state: dict[str, object] = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
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
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
