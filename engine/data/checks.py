"""Checks of the ``data`` settings against each other and against the files that they name, before anything loads."""

from __future__ import annotations

import importlib.util

from engine.config import Config, ConfigError, Data
from engine.data import row_files
from engine.data.row_files import Origin


def check(config: Config) -> None:
    """Refuses a source that cannot be read, a setting that its source cannot honour, and held-out rows trained on.

    Raises:
        ConfigError: with one line for the first thing that is wrong.
    """
    data = config.data
    if data.task is not None and data.path is not None:
        raise ConfigError("give prompts by exactly one of data.task and data.path")
    for key, name, path in (("", data.name, data.path), ("eval_", data.eval_name, data.eval_path)):
        if name is not None and (path is None or row_files.is_file(path)):
            raise ConfigError(
                f"data.{key}name chooses a configuration of a Hugging Face data set, and data.{key}path is "
                f"{'not given' if path is None else f'the file {path}'}: leave it out"
            )
    if data.task is not None:
        _check_task(data)
        return
    _check_splits(data)
    if data.templated and data.chat_template:
        raise ConfigError("data.templated says that prompts are in a template already, so leave data.chat_template out")
    train, held_out = origins(data)
    for origin in (train, held_out):
        if origin is not None and origin.needs_package and importlib.util.find_spec("datasets") is None:
            raise ConfigError(
                f"'{origin.path}' is no file here that is read without the package datasets: pip install datasets"
            )
    if held_out is not None and train.overlaps(held_out) and not data.eval_overlap:
        raise ConfigError(
            f"the held-out prompts are the training prompts ({held_out.path}): give others by data.eval_path or "
            "data.eval_split, or data.eval_overlap true to measure on prompts that are trained on"
        )


def origins(data: Data) -> tuple[Origin, Origin | None]:
    """Where training rows come from, and held-out ones, if any.

    Raises:
        ConfigError: nothing can be read there.
    """
    assert data.path is not None
    train = row_files.locate("data.path", data.path, data.name, data.split)
    if data.eval_path is not None:
        split = data.eval_split or data.split
        return train, row_files.locate("data.eval_path", data.eval_path, data.eval_name, split)
    if data.eval_split is not None:
        return train, row_files.locate("data.path", data.path, data.name, data.eval_split)
    return train, None


def _check_task(data: Data) -> None:
    if data.chat_template:
        raise ConfigError("data.chat_template: the prompts of an embedded task (data.task) are no chat messages")
    defaults = Data()
    for key in (
        "split",
        "eval_path",
        "eval_split",
        "eval_overlap",
        "prompt_column",
        "completion_column",
        "messages_column",
        "chosen_column",
        "rejected_column",
        "templated",
    ):
        if getattr(data, key) != getattr(defaults, key):
            raise ConfigError(
                f"data.{key} is about data.path; an embedded task (data.task) has prompts of its own: leave it out"
            )


def _check_splits(data: Data) -> None:
    """A single file has no splits: a setting that names one would be about nothing."""
    assert data.path is not None
    if data.split != "train" and row_files.is_file(data.path):
        raise ConfigError(
            f"data.split '{data.split}': data.path is the file {data.path}, which has no splits: leave it out"
        )
    source = data.eval_path or data.path
    if data.eval_split is not None and row_files.is_file(source):
        raise ConfigError(
            f"data.eval_split '{data.eval_split}': {source} is a file and has no splits; give the file with the "
            "held-out prompts by data.eval_path"
        )
