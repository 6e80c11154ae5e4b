"""Where rows come from: local files, folders laid out as a Hugging Face data set, and data sets of the hub.

Finding them reads no row and imports nothing heavy, so that what cannot work is refused by settings alone.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from engine.config import ConfigError
from engine.config.quoted import kind_and_words
from engine.data.file_formats import SUFFIXES, Row, file_rows, saved_rows

ACCEPTED = "a .json, .jsonl or .parquet file, or the name of a Hugging Face data set"
HUB_NAME = re.compile(r"(?!\.)[\w.-]+(/[\w.-]+)?")
OTHER_FILES = re.compile(
    r"\.(ndjson|jsonlines|csv|tsv|txt|arrow|feather|orc|pq|pkl|npy|npz|yaml|yml|xlsx?|db|tar|tgz|zip|gz|bz2|xz|zst)$",
    re.IGNORECASE,
)
"""Names that only a file can have."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Rows that a setting names: local files, or where there are none a data set of the hub."""

    path: str
    name: str | None
    split: str
    files: tuple[str, ...] = ()
    saved: str | None = None
    """The folder that ``Dataset.save_to_disk`` wrote, of which the files are."""

    @property
    def needs_package(self) -> bool:
        """True where the package datasets reads the rows."""
        return self.saved is not None or not self.files

    def overlaps(self, other: Origin) -> bool:
        """True if the two share a file, or are the same split of the same data set of the hub."""
        if self.files or other.files:
            return any(os.path.samefile(one, another) for one in self.files for another in other.files)
        return (self.path, self.name, self.split) == (other.path, other.name, other.split)

    def rows(self) -> Iterator[Row]:
        """All rows; within a column, a key whose value is null is left out.

        Parquet gives every object of a column the keys of all of them, null where they are absent, and cannot tell the
        one from the other; so no format does. For the same reason every row has all columns of its source.

        Raises:
            ConfigError: unreadable, no such split, or a line that is no row; names file and line.
        """
        if self.saved is not None:
            rows = list(saved_rows(self.saved))
        elif self.files:
            rows = [row for one in self.files for row in file_rows(one)]
            _check_agreement(rows)
        else:
            rows = list(self._hub_rows())
        names = dict.fromkeys(name for row in rows for name in row.columns)
        for row in rows:
            yield row._replace(columns={name: _without_nulls(row.columns.get(name)) for name in names})

    def _hub_rows(self) -> Iterator[Row]:
        try:
            import datasets

            for number, columns in enumerate(datasets.load_dataset(self.path, self.name, split=self.split)):
                yield Row(f"{self.path} ({self.split})", number, None, dict(columns))
        except Exception as error:  # whatever the package or the hub says
            raise ConfigError(f"{self.path} cannot be read: {kind_and_words(error)}") from error


def locate(key: str, path: str, name: str | None, split: str | None) -> Origin:
    """What a path setting names: what exists here is never taken for a data set of the hub.

    Args:
        key: the setting, which ends with ``path``, for messages.
        split: None stands for ``train``.

    Raises:
        ConfigError: nothing is there, or nothing that can be read.
    """
    place = os.path.expanduser(path)
    if os.path.isdir(place):
        return _folder(key, path, place, name, split or "train")
    if os.path.lexists(place):
        _check_file(key, path, place)
        return Origin(path, None, "train", (place,))
    if (
        not HUB_NAME.fullmatch(path)
        or path.lower().endswith(SUFFIXES)
        or OTHER_FILES.search(path)
        or path.startswith(("~", "."))
    ):
        raise ConfigError(f"{key}: there is no '{path}' (it must be {ACCEPTED})")
    return Origin(path, name, split or "train")


def is_file(path: str) -> bool:
    """True for a path of a single local file, which has neither configurations nor splits."""
    place = os.path.expanduser(path)
    return not os.path.isdir(place) and (os.path.lexists(place) or path.lower().endswith(SUFFIXES))


def _check_file(key: str, path: str, place: str) -> None:
    if not os.path.exists(place):
        raise ConfigError(f"{key}: '{path}' is a link to something that is not there")
    if not os.path.isfile(place):
        raise ConfigError(f"{key}: '{path}' is no regular file, and it is read more than once: write it to one")
    if not path.lower().endswith(SUFFIXES):
        raise ConfigError(f"{key}: '{path}' is neither JSON nor .parquet: convert it; {key} must be {ACCEPTED}")
    if not os.access(place, os.R_OK):
        raise ConfigError(f"{key}: '{path}' may not be read by this user: change its permissions")
    if os.path.getsize(place) == 0:
        raise ConfigError(f"{key}: '{path}' is empty")


def _folder(key: str, path: str, place: str, name: str | None, split: str) -> Origin:
    """The files of one split: of what ``save_to_disk`` wrote, or of a folder whose README.md lists them."""
    content = set(os.listdir(place)) if os.access(place, os.R_OK | os.X_OK) else set()
    if content & {"dataset_dict.json", "state.json"}:
        return _saved(key, path, place, name, split)
    configurations = _configurations(key, path, Path(place) / "README.md")
    names = ", ".join(f"'{label}'" for label in configurations)
    if not configurations:
        raise ConfigError(
            f"{key}: '{path}' is a folder without a README.md that lists its files under configs, as data sets of the "
            f"Hugging Face hub have it: name one of its files, .json, .jsonl or .parquet"
        )
    if name is None:
        chosen = [label for label, entry in configurations.items() if entry.get("default") or label == "default"]
        if len(configurations) > 1 and not chosen:
            raise ConfigError(f"{key}: '{path}' has the configurations {names}: choose one by {_sibling(key, 'name')}")
        name = (chosen or list(configurations))[0]
    if name not in configurations:
        raise ConfigError(f"{_sibling(key, 'name')}: '{path}' has no configuration '{name}', but {names}")
    splits = _splits(configurations[name].get("data_files"))
    if split not in splits:
        raise ConfigError(
            f"{_sibling(key, 'split')}: '{path}' has no split '{split}', but {', '.join(splits) or 'none'}"
        )
    files = []
    for pattern in splits[split]:
        matches = sorted(glob.glob(pattern, root_dir=place, recursive=True))
        if not matches:
            raise ConfigError(f"{key}: '{path}' has no file '{pattern}', which its README.md names")
        for match in matches:
            _check_file(key, os.path.join(path, match), os.path.join(place, match))
            files.append(os.path.join(place, match))
    return Origin(path, name, split, tuple(dict.fromkeys(files)))


def _saved(key: str, path: str, place: str, name: str | None, split: str) -> Origin:
    """One split of what ``DatasetDict.save_to_disk`` wrote, or what ``Dataset.save_to_disk`` did, which has none."""
    if name is not None:
        raise ConfigError(f"{_sibling(key, 'name')}: '{path}' was written by save_to_disk and has no configurations")
    whole = os.path.join(place, "dataset_dict.json")
    splits = _content(key, whole).get("splits") if os.path.exists(whole) else None
    if splits is None and split != "train":
        raise ConfigError(f"{_sibling(key, 'split')}: '{path}' is one Dataset without splits, so it has no '{split}'")
    if splits is not None and split not in splits:
        there = ", ".join(map(str, splits)) or "none"
        raise ConfigError(f"{_sibling(key, 'split')}: '{path}' has no split '{split}', but {there}")
    folder = place if splits is None else os.path.join(place, split)
    listed = _content(key, os.path.join(folder, "state.json")).get("_data_files") or []
    files = tuple(os.path.join(folder, str(one.get("filename"))) for one in listed)
    if lost := [file for file in files if not os.path.isfile(file)]:
        raise ConfigError(f"{key}: '{path}' lacks {lost[0]}, which its state.json names")
    return Origin(path, None, split, files, folder)


def _content(key: str, file: str) -> dict[str, Any]:
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {file} cannot be read: {kind_and_words(error)}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{key}: {file} must be an object, not {content!r:.80}")
    return content


def _configurations(key: str, path: str, readme: Path) -> dict[str, dict[str, Any]]:
    """The entries under ``configs`` in a README's front matter, by their names; none if it has none."""
    try:
        text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
        front = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
        entries = (yaml.safe_load(front[1]) or {}).get("configs") or [] if front else []
        return {str(entry.get("config_name", "default")): entry for entry in entries}
    except (OSError, ValueError, yaml.YAMLError, AttributeError, TypeError) as error:
        raise ConfigError(f"{key}: the README.md of '{path}' cannot be read: {kind_and_words(error)}") from None


def _splits(data_files: Any) -> dict[str, list[str]]:
    """Patterns of files by split, from any of the forms that ``data_files`` may have."""
    if isinstance(data_files, dict):
        pairs = list(data_files.items())
    else:
        entries = data_files if isinstance(data_files, list) else [data_files] if data_files else []
        pairs = [
            (one.get("split", "train"), one.get("path")) if isinstance(one, dict) else ("train", one) for one in entries
        ]
    splits: dict[str, list[str]] = {}
    for split, paths in pairs:
        splits.setdefault(str(split), []).extend(map(str, paths if isinstance(paths, list) else [paths]))
    return splits


def _sibling(key: str, setting: str) -> str:
    return f"{key.removesuffix('path')}{setting}"


def _check_agreement(rows: list[Row]) -> None:
    """Refuses files of one split that have other columns than the first: one of them is no part of the data."""
    columns: dict[str, set[str]] = {}
    for row in rows:
        columns.setdefault(row.source, set()).update(row.columns)
    (first, expected), *others = columns.items() or [("", set())]
    for file, names in others:
        if names != expected:
            raise ConfigError(
                f"{file} has other columns than {first}, of the same split: {', '.join(sorted(names ^ expected))}"
            )


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list) and value and not isinstance(value[0], (int, str, float)):
        return [_without_nulls(inner) for inner in value]
    return value
