"""What a command is told to work on: a run, one of its checkpoints, one of its models, or any other model.

Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from engine.config import ConfigError
from engine.report import records
from engine.run_folder import checkpoints
from engine.run_folder.folder import MODELS


@dataclass(frozen=True, slots=True)
class Place:
    """A model, or a checkpoint that can become one."""

    path: str
    """A model's folder or hub name; a checkpoint's folder where ``checkpoint`` is true."""
    name: str
    """For tables and files."""
    run_dir: Path | None
    """The run that it belongs to."""
    checkpoint: bool = False
    step: int | None = None
    """Rollout batches that it has seen, where that is known."""


def is_run(folder: Path) -> bool:
    """True for the folder of a run."""
    return (folder / records.CONFIG).is_file()


def checkpoint(word: str) -> Place:
    """The checkpoint that a word names: the folder of one, or of a run, whose newest is meant.

    Raises:
        ConfigError: there is none that is whole.
    """
    folder = Path(word).expanduser()
    if is_run(folder):
        newest = checkpoints.newest(folder)
        if newest is None:
            torn = f" that is whole: {faults[0]}" if (faults := checkpoints.torn(folder)) else ""
            raise ConfigError(f"{folder} has no checkpoint{torn} (save.every_steps writes them)")
        return _checkpoint(newest, folder)
    run_dir = folder.resolve().parent.parent
    if folder.is_dir() and folder.resolve().parent.name == "checkpoints" and is_run(run_dir):
        if fault := checkpoints.fault(folder):
            raise ConfigError(f"{folder} is no whole checkpoint: {fault}")
        return _checkpoint(folder, run_dir)
    there = "is neither a run's folder nor one of its checkpoints/step-N" if folder.exists() else "is not there"
    raise ConfigError(f"'{word}' {there}")


def _checkpoint(folder: Path, run_dir: Path) -> Place:
    return Place(str(folder), folder.name, run_dir, checkpoint=True, step=checkpoints.read(folder).step)


def model(word: str) -> Place:
    """The model that a word names: of a run its ``model/``, or before that is written its newest checkpoint.

    Raises:
        ConfigError: it is a folder without a model, or an adapter without its base.
    """
    folder = Path(word).expanduser()
    if is_run(folder):
        final = folder / "model"
        return _model(final, folder) if (final / "config.json").is_file() else checkpoint(word)
    if (folder / checkpoints.STATE).is_file():
        return checkpoint(word)
    if not folder.is_dir():
        if word.startswith((".", "/", "~")):
            raise ConfigError(f"there is no '{word}'")
        return Place(word, Path(word).name, None)
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise ConfigError(
                f"'{word}' is an adapter without its base: export the run with --lora merged, or merge it with peft"
            )
        raise ConfigError(f"'{word}' is no model folder, it has no config.json, and no run's folder either")
    return _model(folder, run_of(folder))


def _model(folder: Path, run_dir: Path | None) -> Place:
    return Place(str(folder), folder.name, run_dir, step=_step(folder, run_dir) if run_dir else None)


def _step(folder: Path, run_dir: Path) -> int | None:
    """The step of a run's model, as its name or the run's summary says it."""
    step = folder.name.removeprefix("step-")
    if step.isdigit():
        return int(step)
    summary = run_dir / records.SUMMARY
    if folder.name != "model" or not summary.is_file():
        return None
    found: int | None = json.loads(summary.read_text(encoding="utf-8")).get("steps")
    return found


def run_of(folder: Path) -> Path | None:
    """The run whose ``model``, ``best`` or ``models/step-N`` a folder is, or None."""
    whole = Path(os.path.abspath(folder))
    place = whole.parent.parent if whole.parent.name == MODELS else whole.parent
    return place if is_run(place) else None


def models_of_run(run_dir: Path) -> list[Place]:
    """A run's models, as far as they exist: ``models/step-N`` in order of their steps, ``best``, ``model``.

    Of ``model`` and the ``models/step-N`` of the same step, which are equal, only ``model`` is given.
    """

    def there(folders: list[Path]) -> list[Place]:
        return [_model(path, run_dir) for path in folders if (path / "config.json").is_file()]

    last = there([run_dir / "model"])
    steps = {place.step for place in last}
    kept = [place for place in there(list((run_dir / MODELS).glob("step-*"))) if place.step not in steps]
    return [*sorted(kept, key=lambda place: place.step or 0), *there([run_dir / "best"]), *last]


def digest(path: str) -> str:
    """A model folder's name and the digest of all its files; of a hub name it is the name."""
    folder = Path(path)
    if not folder.is_dir():
        return path
    whole = hashlib.sha256()
    for file in sorted(one for one in folder.iterdir() if one.is_file() and one.name != "README.md"):
        whole.update(file.name.encode())
        with file.open("rb") as opened:
            whole.update(hashlib.file_digest(opened, "blake2b").digest())
    return f"{folder.name} ({whole.hexdigest()[:16]})"
