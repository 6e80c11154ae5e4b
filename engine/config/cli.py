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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from engine.config import Config, ConfigError, Section, yaml_file

FORMS: dict[type, str] = {
    list: "a,b or [a, b] (with quotes where a comma belongs to an item: ['a', ',b'])",
    tuple: "a,b or [a, b]",
    dict: "name=value,name=value or {name: value}, or one item by --KEY.name value",
}
"""How values of several parts are written, for messages and ``--help``."""
ALGORITHMS = ",".join(typing.get_args(Config.model_fields["algo"].annotation))
USAGE = f"python -m engine.run --algo {{{ALGORITHMS}}} [--config FILE.yaml] [--section.key value ...]"


def leaves(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every leaf of the tree as (dotted key, field)."""
    for name, field in section.model_fields.items():
        if (inner := _section(field)) is not None:
            yield from leaves(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def _section(field: FieldInfo) -> type[Section] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


@dataclass
class Command:
    """What a command line says besides the configuration itself."""

    config: str | None = None
    """The configuration file."""
    print_config: bool = False


def parse(argv: list[str]) -> tuple[Config, Command]:
    """Parses a command line.

    Returns:
        the configuration, and what is about the command itself.

    Raises:
        ConfigError: unknown key (with a suggestion), wrong type, unreadable file.
        SystemExit: after ``--help``.
    """
    command, given = _read_options(argv)
    if command.config is not None and "resume" in given:
        raise ConfigError("resume: a run goes on with its own configuration; give --resume or --config, not both")
    if "resume" in given:
        command.config = str(Path(given["resume"]) / "config.yaml")
        if not Path(command.config).is_file():
            raise ConfigError(f"resume: '{given['resume']}' is not a run folder, it has no config.yaml")
        if moved := {"name", "output_dir"} & given.keys():
            raise ConfigError(f"{moved.pop()}: a resumed run stays in its folder, {given['resume']}")
    elif command.config is None and not {"model.path", "data.path", "data.task"} & given.keys():
        command.config = str(quickstart())
    tree = yaml_file.read(command.config) if command.config else {}
    if tree.get("resume") is not None:
        raise ConfigError(f"resume: stands in {command.config}; it goes on the command line, --resume {tree['resume']}")
    if "resume" in given:
        tree = _without_place(tree)
    for key, text in sorted(given.items(), key=lambda one: _is_item(one[0])):  # a mapping before its single items
        yaml_file.assign(tree, key, text if _is_item(key) else _value(key, text))
    config = validate(tree)
    try:
        os.environ.update(config.env)
    except (ValueError, OSError) as error:
        raise ConfigError(f"env: {error}") from None
    return config, command


def _read_options(argv: list[str]) -> tuple[Command, dict[str, str]]:
    """The options as given, as text by key; of a key given twice the last one holds, as in most commands."""
    known, command, given = {key for key, _ in leaves()}, Command(), {}
    rest = iter(argv)
    for word in rest:
        name, equals, text = word.removeprefix("--").partition("=")
        if word in ("-h", "--help"):
            _parser().print_help()
            raise SystemExit(0)
        if word == "--print-config":
            command.print_config = True
            continue
        if not word.startswith("--") or not name:
            raise ConfigError(f"'{word}' is not an option; options read --section.key value")
        handed_on = name == "local_rank" and "LOCAL_RANK" in os.environ  # by DeepSpeed's launcher, once more
        if not (name in known or name == "config" or handed_on or _is_item(name)):
            raise ConfigError(_unknown(name))
        if not equals:
            text = next(rest, "--")
            if text.startswith("--"):
                raise ConfigError(f"--{name} needs a value: --{name} VALUE, or --{name}=VALUE if it begins with --")
        if name == "config":
            command.config = text
        elif not handed_on:
            given[name] = text
    return command, given


def _is_item(key: str) -> bool:
    """True for one item of a mapping, such as reward.weights.model."""
    return any(
        key.startswith(f"{leaf}.") and key != f"{leaf}." for leaf, field in leaves() if _container(field) is dict
    )


def _container(field: FieldInfo) -> type | None:
    """``list``, ``tuple`` or ``dict`` for a leaf that holds several values."""
    origin = typing.get_origin(field.annotation)
    return origin if origin in FORMS else None


def validate(tree: Mapping[str, Any]) -> Config:
    """Turns a nested mapping into a ``Config``; raises ``ConfigError`` for the first fault in it."""
    sections = {name for name, field in Config.model_fields.items() if _section(field)}
    try:
        # A section all of whose lines are commented out is null in YAML.
        return Config.model_validate({k: {} if v is None and k in sections else v for k, v in tree.items()})
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            raise ConfigError(_unknown(key)) from None
        if isinstance(fault["input"], Mapping) and fault["type"] == "model_type":
            raise ConfigError(f"{key} is a section; give its keys") from None
        message = fault["msg"].removeprefix("Value error, ")
        form = _form(key)
        raise ConfigError(f"{key} = {fault['input']!r}: {message[0].lower()}{message[1:]}{form}") from None


def _form(key: str) -> str:
    """What to add to a message about a value of several parts, or about one of the parts."""
    for leaf, field in leaves():
        if (kind := _container(field)) and f"{key}.".startswith(f"{leaf}."):
            return f"; it reads {FORMS[kind].replace('KEY', leaf)}"
    return ""


def load_run(run_dir: Path) -> Config:
    """The configuration of a run folder; its name and place are the folder's own, wherever it lies now."""
    return validate(_without_place(yaml_file.read(str(run_dir / "config.yaml"))))


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
    checkout = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"
    return checkout if checkout.is_file() else Path(sys.prefix) / "share" / "tandem" / "quickstart.yaml"


def _parser() -> argparse.ArgumentParser:
    """For ``--help`` alone: argparse takes -1e-3 for an option and says its errors in several lines."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.run",
        usage=USAGE,
        description="Trains a language model by reinforcement learning from (human) feedback.",
        epilog="A list reads a,b or [a, b], a mapping name=value,name=value or {name: value}; one item of a mapping is "
        "set by --reward.weights.model 0.5. Of a key given twice the last one holds.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
    )
    top = parser.add_argument_group("run")
    top.add_argument(
        "--config",
        metavar="FILE.yaml",
        help="configuration file; its keys are those below, nested. Default: configs/quickstart.yaml",
    )
    top.add_argument(
        "--print-config",
        action="store_true",
        help="print the resolved configuration and exit; what is missing in it is said on stderr",
    )
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
    """A short name of a leaf's type for ``--help``, or the form of its value."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return "{" + ",".join(str(a) for a in args) + "}"
    if origin is typing.Annotated:
        return _type_name(args[0])
    if origin in FORMS:
        return "NAME=VALUE,..." if origin is dict else "A,B,..."
    if args:
        return "|".join(_type_name(a) for a in args if a is not type(None))
    return str(getattr(annotation, "__name__", annotation)).upper()


def _value(key: str, text: str) -> Any:
    """A command-line string as what pydantic should see: several values apart, ``null`` as none, the rest as text."""
    field = dict(leaves())[key]
    if text.lower() in ("null", "none") and type(None) in typing.get_args(field.annotation):
        return None
    if typing.get_origin(field.annotation) is typing.Literal:
        return {str(choice): choice for choice in typing.get_args(field.annotation)}.get(text, text)
    kind = _container(field)
    if kind is None:
        return text
    if text.strip().startswith("{" if kind is dict else "["):
        return yaml_file.value(text, f"{key} = {text!r}")
    if kind is not dict:
        return _parts(text) if text else []
    pairs = [part.partition("=") for part in _parts(text)] if text else []
    if all(name.strip() and equals for name, equals, _ in pairs):
        return {name.strip(): item for name, _, item in pairs}
    return yaml_file.value(text, f"{key} = {text!r}")


def _parts(text: str) -> list[str]:
    """Items between commas; one item alone is taken as it is, blanks included, as it may be a token."""
    return [part.strip() for part in text.split(",")] if "," in text else [text]


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
