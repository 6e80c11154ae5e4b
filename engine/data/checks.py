"""Checks of the ``data`` settings against each other and against the files that they name, before anything loads."""

from __future__ import annotations

import importlib.util

from engine.config import Config, ConfigError, Data, template_file
from engine.data import row_files, sources
from engine.data.sources import Source


def check(config: Config) -> None:
    """Refuses a source that cannot be read, a setting that its source cannot honour, and held-out rows trained on.

    Raises:
        ConfigError: with one line for the first thing that is wrong.
    """
    data = config.data
    if sum(given is not None for given in (data.task, data.path, data.mixture or None)) > 1:
        raise ConfigError("give prompts by exactly one of data.task and data.path (or data.mixture)")
    _check_names(data)
    if data.task is not None:
        _check_task(data)
        return
    if data.mixture:
        _check_mixture(config)
    else:
        _check_splits(data)
    if data.eval_fraction is not None and (data.eval_path or data.eval_split) is not None:
        raise ConfigError(
            "data.eval_fraction holds out some of the training rows, and data.eval_path and data.eval_split name "
            "others: give one"
        )
    if data.templated and data.chat_template:
        raise ConfigError("data.templated says that prompts are in a template already, so leave data.chat_template out")
    template_file.text(data)
    train, held_out = sources.training(data), sources.held_out(data)
    for source in [*train, *held_out]:
        if source.origin.needs_package and importlib.util.find_spec("datasets") is None:
            raise ConfigError(
                f"'{source.origin.path}' is no file here that is read without the package datasets: "
                "pip install datasets"
            )
    if data.eval_fraction is None and not data.eval_overlap:
        _check_overlap(train, held_out)


def _check_names(data: Data) -> None:
    for key, name, path in (("", data.name, data.path), ("eval_", data.eval_name, data.eval_path)):
        if name is not None and (path is None or row_files.is_file(path)):
            raise ConfigError(
                f"data.{key}name chooses a configuration of a Hugging Face data set, and data.{key}path is "
                f"{'not given' if path is None else f'the file {path}'}: leave it out"
            )


def _check_mixture(config: Config) -> None:
    """Its sources say by themselves what ``data.split`` would, and have no common end that epochs could count."""
    data = config.data
    for key, unset in (("split", "train"), ("eval_split", None)):
        if getattr(data, key) != unset:
            raise ConfigError(f"data.{key} is about data.path, and data.mixture has splits of its own: leave it out")
    for number, source in enumerate(data.mixture):
        for key, unset in (("name", None), ("split", "train")):
            if row_files.is_file(source.path) and getattr(source, key) != unset:
                raise ConfigError(f"data.mixture.{number}.{key}: {source.path} is a file and has none: leave it out")
    if config.train.epochs is not None:
        raise ConfigError(
            "train.epochs counts passes over one data set, and those of data.mixture are passed over at paces of their "
            "own: give train.steps"
        )


def _check_overlap(train: list[Source], held_out: list[Source]) -> None:
    for source in held_out:
        if any(source.origin.overlaps(one.origin) for one in train):
            raise ConfigError(
                f"the held-out prompts are the training prompts ({source.origin.path}): give others by data.eval_path "
                "or data.eval_split, or data.eval_overlap true to measure on prompts that are trained on"
            )


def _check_task(data: Data) -> None:
    if data.chat_template:
        raise ConfigError("data.chat_template: the prompts of an embedded task (data.task) are no chat messages")
    defaults = Data()
    for key in (
        "split",
        "eval_path",
        "eval_split",
        "eval_fraction",
        "eval_overlap",
        "prompt_column",
        "completion_column",
        "messages_column",
        "chosen_column",
        "rejected_column",
        "tools_column",
        "chat_template_kwargs",
        "new_special_tokens",
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
