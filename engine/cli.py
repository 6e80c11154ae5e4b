"""Command line and YAML to one checked ``Config``: defaults <- file <- ``--section.key value``.

Every fault is one line naming the key, raised as ``ConfigError`` before anything heavy is imported.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from engine.config import Config, ConfigError, Section

ALGORITHMS = ",".join(typing.get_args(Config.model_fields["algo"].annotation))
USAGE = f"python -m engine.run --algo {{{ALGORITHMS}}} [--config FILE.yaml] [--section.key value ...]"


def leaves(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every leaf of the tree as (dotted key, field)."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def parse(argv: list[str]) -> tuple[Config, argparse.Namespace]:
    """Parses a command line.

    Returns:
        the configuration, and the options that are about the command itself (``config``, ``print_config``).

    Raises:
        ConfigError: unknown key (with a suggestion), wrong type, unreadable file.
        SystemExit: after ``--help``.
    """
    parser = _parser()
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ConfigError(
            _unknown(unknown[0].lstrip("-").split("=")[0])
            if unknown[0].startswith("--")
            else f"'{unknown[0]}' is not an option; options read --section.key value"
        )
    about_command = ("config", "print_config", "local_rank")
    given = {key: value for key, value in vars(options).items() if key not in about_command}
    if options.config is not None and "resume" in given:
        raise ConfigError("resume: a run goes on with its own configuration; give --resume or --config, not both")
    if "resume" in given:
        options.config = str(Path(given["resume"]) / "config.yaml")
        if not Path(options.config).is_file():
            raise ConfigError(f"resume: '{given['resume']}' is not a run folder, it has no config.yaml")
        if moved := {"name", "output_dir"} & given.keys():
            raise ConfigError(f"{moved.pop()}: a resumed run stays in its folder, {given['resume']}")
    elif options.config is None and not {"model.path", "data.path", "data.task"} & given.keys():
        options.config = str(quickstart())
    tree = load_yaml(options.config) if options.config else {}
    if "resume" in given:
        tree = _without_place(tree)
    for key, text in given.items():
        _assign(tree, key, _value(key, text))
    config = validate(tree)
    try:
        os.environ.update(config.env)
    except (ValueError, OSError) as error:
        raise ConfigError(f"env: {error}") from None
    return config, options


def validate(tree: Mapping[str, Any]) -> Config:
    """Turns a nested mapping into a ``Config``; raises ``ConfigError`` for the first fault in it."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            raise ConfigError(_unknown(key)) from None
        if isinstance(fault["input"], Mapping) and fault["type"] == "model_type":
            raise ConfigError(f"{key} is a section; give its keys") from None
        message = fault["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{key} = {fault['input']!r}: {message[0].lower()}{message[1:]}") from None


def load_yaml(path: str) -> dict[str, Any]:
    """Reads a configuration file; an empty one is an empty mapping."""
    try:
        with open(path, encoding="utf-8") as file:
            tree = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"--config {path}: must be a mapping of sections, not a {type(tree).__name__}")
    return tree


def load_run(run_dir: Path) -> Config:
    """The configuration of a run folder; its name and place are the folder's own, wherever it lies now."""
    return validate(_without_place(load_yaml(str(run_dir / "config.yaml"))))


def _without_place(tree: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if key not in ("name", "output_dir")}


def dump_yaml(config: Config) -> str:
    """The whole configuration as YAML that ``--config`` takes again."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def flat(config: Config) -> Iterator[tuple[str, Any]]:
    """Every leaf of a configuration as (dotted key, value)."""
    for key, _ in leaves():
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        yield key, value


def quickstart() -> Path:
    """The configuration used when none is given: the embedded task on the CPU."""
    checkout = Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml"
    return checkout if checkout.is_file() else Path(sys.prefix) / "share" / "tandem" / "quickstart.yaml"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine.run",
        usage=USAGE,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        description="Trains a language model by reinforcement learning from (human) feedback.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
    )
    top = parser.add_argument_group("run")
    top.add_argument(
        "--config",
        metavar="FILE.yaml",
        default=None,
        help="configuration file; its keys are those below, nested. Default: configs/quickstart.yaml",
    )
    top.add_argument(
        "--print-config", action="store_true", default=False, help="print the resolved configuration and exit"
    )
    if "LOCAL_RANK" in os.environ:  # DeepSpeed's launcher passes it to its ranks once more
        top.add_argument("--local_rank", help=argparse.SUPPRESS)
    groups = {"": top}
    for key, field in leaves():
        section = key.rpartition(".")[0]
        if section not in groups:
            doc = (Config.model_fields[section].annotation.__doc__ or "").strip()  # type: ignore[union-attr]
            groups[section] = parser.add_argument_group(section, doc)
        default = field.get_default(call_default_factory=True)
        shown = "" if default in (None, [], {}) else f" (default: {default})"
        groups[section].add_argument(
            f"--{key}", metavar=_type_name(field.annotation), help=f"{field.description}{shown}".replace("%", "%%")
        )
    return parser


def _type_name(annotation: Any) -> str:
    """A short name of a leaf's type for ``--help``."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return "{" + ",".join(str(a) for a in args) + "}"
    if origin is typing.Annotated:
        return _type_name(args[0])
    if origin in (list, dict, tuple):
        return origin.__name__.upper()
    if args:
        return "|".join(_type_name(a) for a in args if a is not type(None))
    return str(getattr(annotation, "__name__", annotation)).upper()


def _value(key: str, text: str) -> Any:
    """A command-line string as what pydantic should see: containers by YAML, ``null`` as none, the rest as text."""
    annotation = dict(leaves())[key].annotation
    if text.lower() in ("null", "none") and type(None) in typing.get_args(annotation):
        return None
    if typing.get_origin(annotation) is typing.Literal:
        return {str(choice): choice for choice in typing.get_args(annotation)}.get(text, text)
    if typing.get_origin(annotation) in (list, dict, tuple):
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            return text
    return text


def _assign(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, leaf = key.split(".")
    for section in sections:
        inner = tree.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{section} = {inner!r}: is a section; give its keys")
        tree = inner
    tree[leaf] = value


def _unknown(key: str) -> str:
    """One line for a key that does not exist, with the nearest ones that do, those of its own section first."""
    section, _, leaf = key.rpartition(".")
    known = {name: name.rpartition(".") for name, _ in leaves()}
    near = [name for name, (_, _, last) in known.items() if _means(leaf, last)]
    near.sort(key=lambda name: (known[name][0] != section, known[name][2] != leaf))
    near = near or difflib.get_close_matches(key, known, n=2, cutoff=0.6)
    near = near or [n for n in known if difflib.SequenceMatcher(None, leaf, known[n][2]).ratio() > 0.75]
    hint = f"did you mean {' or '.join(near[:2])}?" if near else "--help lists all keys"
    return f"unknown key '{key}'; {hint}"


def _means(short: str, name: str) -> bool:
    """True for a name itself, its words' initials (lr for learning_rate), and a part of it that begins at a word."""
    initials = "".join(word[0] for word in name.split("_"))
    return short == name or (len(short) > 1 and (short == initials or f"_{short}" in f"_{name}"))
