"""A user's own algorithm, ``--algo FILE.py:CLASS`` or ``PACKAGE.MODULE:CLASS``, and the tree with its settings."""

from __future__ import annotations

import functools
import inspect
import re
import shutil
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from algorithms.base import Algorithm, Section, ValueModelSettings
from algorithms.registry import BUILT_IN
from engine.config import Config, ConfigError, user_code
from engine.config.schema import config_with

COPY = "algorithm.py"
"""The algorithm's file in a run's folder, which a resumed run takes it from."""


def tree_for(algo: object) -> type[Config]:
    """The configuration tree for a value of ``algo``: ``Config``, or one with the section of a user's algorithm.

    Raises:
        ConfigError: the algorithm cannot be had, or its record cannot be right.
    """
    return _tree_with(algo) if isinstance(algo, str) and ":" in algo else Config


def forget() -> None:
    """Has files that were imported for an earlier run in this process imported anew."""
    _tree_with.cache_clear()


@functools.cache
def _tree_with(algo: str) -> type[Config]:
    user_code.check("algo", algo, "Class")
    module, kind = user_code.load("algo", algo, _is_algorithm)
    if not _is_algorithm(kind):
        instead = user_code.others(module, algo.rpartition(":")[2], _is_algorithm)
        raise ConfigError(f"algo '{algo}' is no subclass of algorithms.base.Algorithm{instead}")
    if fault := _fault(kind):
        raise ConfigError(f"algo '{algo}': {fault}")
    return config_with(algo, kind())


def file_of(config: Config) -> Path | None:
    """The file of the run's algorithm, where the user named one."""
    place = config.algo.rpartition(":")[0]
    return Path(place) if place.endswith(".py") else None


def in_folder(algo: Any, run_dir: Path) -> Any:
    """The value of ``algo`` by which a run's folder names the copy in it; any but a user's file as it is."""
    place, _, name = algo.rpartition(":") if isinstance(algo, str) else ("", "", "")
    return f"{run_dir / COPY}:{name}" if place.endswith(".py") else algo


def keep(config: Config, run_dir: Path) -> None:
    """Copies the algorithm's file, if the user named one, into the folder of a new run."""
    if file := file_of(config):
        shutil.copyfile(file, run_dir / COPY)


def _is_algorithm(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, Algorithm) and found is not Algorithm


def _fault(kind: type[Algorithm]) -> str | None:
    """What is wrong with a user's record, or None."""
    if inspect.isabstract(kind):
        return "it has no objective, the method that says what is minimised"
    name = getattr(kind, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z]\w{0,39}", name):
        return f"its name is {name!r}, and must be a word, for it becomes part of file names"
    if name in BUILT_IN:
        return f"its name '{name}' is that of an algorithm that is built in: give it another"
    for attribute, allowed in _CHOICES.items():
        if (value := getattr(kind, attribute)) not in allowed:
            return f"its {attribute} is {value!r}, and must be one of {', '.join(map(repr, allowed))}"
    if type(kind.least_group) is not int or kind.least_group < 1:
        return f"its least_group is {kind.least_group!r}, and must be a count of responses"
    if kind.batches == "rows" and (kind.value_model or kind.kl or kind.policy_ratio):
        return (
            "its batches are rows of a data set, which go with no value_model, kl or policy_ratio: nothing is sampled"
        )
    if kind.head == "score" and (kind.batches, kind.rows) != ("rows", "pair"):
        return "its head is a score, which is trained on pairs of a data set's rows: batches = 'rows', rows = 'pair'"
    if kind.head == "score" and kind.reference:
        return "its head is a score, which is compared with no reference policy"
    return _fault_of_settings(kind)


_CHOICES = {
    "value_model": (True, False),
    "reference": (True, False),
    "kl": ("reward", "loss", None),
    "kl_estimator": ("k1", "k2", "k3"),
    "policy_ratio": (True, False),
    "rows": ("single", "pair"),
    "batches": ("sampler", "rows"),
    "head": ("language", "score"),
}
"""The values that attributes of a record may have."""


def _fault_of_settings(kind: type[Algorithm]) -> str | None:
    needed = ValueModelSettings if kind.value_model else Section
    settings, section = kind.Settings, kind.section
    if settings is None:
        return "it has a value_model, so it needs Settings that extend ValueModelSettings" if kind.value_model else None
    if not (isinstance(settings, type) and issubclass(settings, needed)):
        return f"its Settings must be a subclass of algorithms.base.{needed.__name__}"
    if not isinstance(section, str) or not re.fullmatch(r"[A-Za-z]\w*", section):
        return f"its section is {section!r}, and must be a word"
    there = Config.model_fields.get(section)
    if hasattr(Config, section) or (there is not None and there.annotation is not settings):
        return f"its section '{section}' is taken: give it another"
    try:
        settings()
    except ValidationError as error:
        first = error.errors()[0]
        return f"its settings need defaults that are right: {'.'.join(map(str, first['loc']))}: {first['msg']}"
    return None
