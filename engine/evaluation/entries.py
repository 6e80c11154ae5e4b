"""The models of an evaluation: those of a run, or those that are named. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine.config import Config, ConfigError
from engine.evaluation import places
from engine.evaluation.places import Place

BASE = "base"
"""What the model that a run began with is called."""


def named(words: Sequence[str]) -> tuple[list[Place], Path | None]:
    """The models that a command line names, each with a name of its own, and the run if they are all of one.

    A run alone stands for all its models, the one that it began with among them, whose path is empty until it is known.

    Raises:
        ConfigError: nothing is named, or something that is no model.
    """
    if not words:
        raise ConfigError("nothing to evaluate: name a run, or models")
    if len(words) == 1 and places.is_run(run_dir := Path(words[0]).expanduser()):
        models = places.models_of_run(run_dir) or [places.checkpoint(words[0])]
        return [Place("", BASE, run_dir, step=0), *models], run_dir
    found = [places.model(word) for word in words]
    taken = Counter(place.name for place in found)
    found = [_longer_name(place) if taken[place.name] > 1 else place for place in found]
    if twice := [name for name, count in Counter(place.name for place in found).items() if count > 1]:
        raise ConfigError(f"two of the models would be called '{twice[0]}': rename a folder, or name each once")
    runs = {place.run_dir for place in found}
    return found, runs.pop() if len(runs) == 1 else None


def _longer_name(place: Place) -> Place:
    folder = place.run_dir or Path(place.path).resolve().parent
    return replace(place, name=f"{folder.resolve().name}-{place.name}")


def with_base(models: Sequence[Place], base: str) -> list[Place]:
    """The same with the folder or hub name of the model that the run began with."""
    return [place if place.path else replace(place, path=base) for place in models]


def baseline(name: str | None, models: Sequence[Place]) -> str:
    """The name of the model that the others are compared with: by default the base, which is the first.

    Raises:
        ConfigError: there is no model of that name.
    """
    names = [place.name for place in models]
    if name is not None and name not in names:
        raise ConfigError(f"baseline.model: there is no '{name}' among {', '.join(names)}")
    return name or names[0]


def reference_of(run: Config) -> str:
    """What a run keeps its policy near to, by its name in the table or its path."""
    return run.model.reference_path or BASE
