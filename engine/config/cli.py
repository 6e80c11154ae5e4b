"""Command line and YAML to one checked ``Config``: defaults <- file <- ``--section.key value``.

Every fault is one line naming the key, raised as ``ConfigError`` before anything heavy is imported.
"""

from __future__ import annotations

import os
import sys
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from algorithms.registry import BUILT_IN
from engine.config import Config, ConfigError, Section, help_text, template_file, user_algorithm, yaml_file
from engine.config.keys import container, form, is_item, leaves, section_of, unknown

Tree = typing.TypeVar("Tree", bound=Section)


@dataclass
class Command:
    """What a command line says besides the configuration itself."""

    config: str | None = None
    """The configuration file."""
    print_config: bool = False
    help: bool = False
    without_value: str | None = None
    """An option at which reading ended, for want of its value."""
    given: dict[str, str] = field(default_factory=dict)
    """Text by key, as given; of a key given twice the last one holds, as in most commands."""
    words: list[str] = field(default_factory=list)
    """What is no option: what a command other than a run works on."""


def parse(argv: list[str]) -> tuple[Config, Command]:
    """Parses a command line.

    Returns:
        the configuration, and what is about the command itself.

    Raises:
        ConfigError: unknown key (with a suggestion), wrong type, unreadable file, an algorithm that cannot be had.
        SystemExit: after ``--help``.
    """
    command = read_options(argv)
    if command.words:
        raise ConfigError(f"'{command.words[0]}' is not an option; options read --section.key value")
    given, tree = command.given, _file(command)
    user_algorithm.forget()
    kind = user_algorithm.tree_for(given.get("algo", tree.get("algo")))
    if command.help:
        print(help_text.of(kind), end="")
        raise SystemExit(0)
    for key, other in (("train.steps", "epochs"), ("train.epochs", "steps")):
        if key in given and isinstance(tree.get("train"), dict):
            tree["train"].pop(other, None)  # of the two lengths of a run the one on the command line
    assign_options(tree, kind, command)
    config = validate(tree)
    try:
        os.environ.update(config.env)
    except (ValueError, OSError) as error:
        raise ConfigError(f"env: {error}") from None
    return config, command


def assign_options(tree: dict[str, Any], kind: type[Section], command: Command) -> None:
    """Puts the options of a command line into the nested settings ``tree``, over what is there.

    Args:
        kind: the tree of settings that these are.

    Raises:
        ConfigError: an unknown key, or an option without its value.
    """
    given, known = command.given, {key for key, _ in leaves(kind)}
    for key in [*given, *filter(None, [command.without_value])]:
        if not (key in known or key == "config" or is_item(kind, key)):
            raise ConfigError(unknown(kind, key))
    if name := command.without_value:
        raise ConfigError(f"--{name} needs a value: --{name} VALUE, or --{name}=VALUE if it begins with --")
    for key, text in sorted(given.items(), key=lambda one: is_item(kind, one[0])):  # a mapping before its single items
        yaml_file.assign(tree, key, _item(kind, key, text) if is_item(kind, key) else _value(kind, key, text))


def read_options(argv: list[str]) -> Command:
    """The options as given.

    Raises:
        ConfigError: a word that begins like an option and is none.
    """
    command, rest = Command(), iter(argv)
    for word in rest:
        name, equals, text = word.removeprefix("--").partition("=")
        if word in ("-h", "--help"):
            command.help = True
            continue
        if word == "--print-config":
            command.print_config = True
            continue
        if word and not word.startswith("-"):
            command.words.append(word)
            continue
        if not word.startswith("--") or not name:
            raise ConfigError(f"'{word}' is not an option; options read --section.key value")
        if not equals:
            text = next(rest, "--")
            if text.startswith("--"):
                command.without_value = name
                break
        if name == "config":
            command.config = text
        elif not (name == "local_rank" and "LOCAL_RANK" in os.environ):  # by DeepSpeed's launcher, once more
            command.given[name] = text
    return command


def _file(command: Command) -> dict[str, Any]:
    """The settings below those of the command line: a file's, those of the run that is resumed, or the quickstart's."""
    given = command.given
    if command.config is not None and "resume" in given:
        raise ConfigError("resume: a run goes on with its own configuration; give --resume or --config, not both")
    if "resume" in given:
        given["resume"] = os.path.expanduser(given["resume"])
        command.config = str(Path(given["resume"]) / "config.yaml")
        if not Path(command.config).is_file():
            raise ConfigError(f"resume: '{given['resume']}' is not a run folder, it has no config.yaml")
        if moved := {"name", "output_dir"} & given.keys():
            raise ConfigError(f"{moved.pop()}: a resumed run stays in its folder, {given['resume']}")
    elif command.config is None and not {"model.path", "data.path", "data.mixture", "data.task"} & given.keys():
        known = BUILT_IN.get(given.get("algo", ""))
        command.config = str(quickstart(known is not None and known.batches == "rows"))
    tree = yaml_file.read(command.config) if command.config else {}
    if "resume" in given and not tree:
        raise ConfigError(f"resume: {command.config} is empty, and without its settings the run cannot go on")
    if tree.get("resume") is not None:
        raise ConfigError(f"resume: stands in {command.config}; it goes on the command line, --resume {tree['resume']}")
    return _at(tree, Path(given["resume"])) if "resume" in given else tree


def validate(tree: Mapping[str, Any]) -> Config:
    """Turns a nested mapping into a ``Config``; raises ``ConfigError`` for the first fault in it."""
    return checked(user_algorithm.tree_for(tree.get("algo")), tree)


def checked(kind: type[Tree], tree: Mapping[str, Any]) -> Tree:
    """Turns a nested mapping into settings of this kind; raises ``ConfigError`` for the first fault in it."""
    sections = {name for name, field in kind.model_fields.items() if section_of(field)}
    try:
        # A section all of whose lines are commented out is null in YAML.
        return kind.model_validate({k: {} if v is None and k in sections else v for k, v in tree.items()})
    except ValidationError as error:
        fault = error.errors()[0]
        key = _key(kind, fault["loc"])
        if fault["type"] == "extra_forbidden":
            raise ConfigError(unknown(kind, key)) from None
        if isinstance(fault["input"], Mapping) and fault["type"] == "model_type":
            raise ConfigError(f"{key} is a section; give its keys") from None
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "model_type":  # pydantic's words name a class
            message = "must be keys with their values"
        said = f"{message[0].lower()}{message[1:]}{form(kind, key)}"
        raise ConfigError(f"{key} = {fault['input']!r}: {said}") from None


def _key(kind: type[Section], place: tuple[int | str, ...]) -> str:
    """The dotted key of a fault, without what pydantic adds to it where a value may be of several types."""
    key = ".".join(map(str, place))
    single = [leaf for leaf, field in leaves(kind) if container(field) is None]
    return next((leaf for leaf in single if key.startswith(f"{leaf}.")), key)


def load_run(run_dir: Path) -> Config:
    """The configuration of a run folder; its name and place are the folder's own, wherever it lies now."""
    return validate(_at(yaml_file.read(str(run_dir / "config.yaml")), run_dir))


def _at(tree: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """A run's settings without its name and place, and with its own copies of a user's algorithm and template."""
    here = {key: value for key, value in tree.items() if key not in ("name", "output_dir")}
    if "algo" in here:
        here["algo"] = user_algorithm.in_folder(here["algo"], run_dir)
    if isinstance(data := here.get("data"), dict) and "chat_template" in data:
        here["data"] = data | {"chat_template": template_file.in_folder(data["chat_template"], run_dir)}
    return here


def dump_yaml(config: Config) -> str:
    """The whole configuration as YAML that ``--config`` takes again."""
    tree = config.model_dump(mode="json")
    if config.train.epochs is not None:
        del tree["train"]["steps"]  # they follow, once the rows are counted
    return yaml.safe_dump(tree, sort_keys=False)


def flat(config: Config) -> Iterator[tuple[str, Any]]:
    """Every leaf of a configuration as (dotted key, value)."""
    for key, _ in leaves(type(config)):
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        yield key, value


def quickstart(rows: bool = False) -> Path:
    """The configuration used when none is given: the embedded task on the CPU, its prompts or its rows."""
    name = "quickstart-rows.yaml" if rows else "quickstart.yaml"
    checkout = Path(__file__).resolve().parents[2] / "configs" / name
    return checkout if checkout.is_file() else Path(sys.prefix) / "share" / "tandem" / name


def _value(kind: type[Section], key: str, text: str) -> Any:
    """A command-line string as what pydantic should see: several values apart, ``null`` as none, the rest as text."""
    field = dict(leaves(kind))[key]
    if text.lower() in ("null", "none") and type(None) in typing.get_args(field.annotation):
        return None
    if typing.get_origin(field.annotation) is typing.Literal:
        return {str(choice): choice for choice in typing.get_args(field.annotation)}.get(text, text)
    several = container(field)
    if several is None:
        return text
    read = yaml_file.typed if _holds_anything(field) else yaml_file.value
    where = f"{key} = {text!r}"
    if text.strip().startswith("{" if several is dict else "["):
        return read(text, where)
    if several is not dict:
        return _parts(text) if text else []
    pairs = [part.partition("=") for part in _parts(text)] if text else []
    if all(name.strip() and equals for name, equals, _ in pairs):
        return {name.strip(): read(item, where) if _holds_anything(field) else item for name, _, item in pairs}
    return read(text, where)


def _item(kind: type[Section], key: str, text: str) -> Any:
    """One item of a mapping: text, unless the mapping takes values of any kind."""
    field = next(field for leaf, field in leaves(kind) if container(field) is dict and key.startswith(f"{leaf}."))
    return yaml_file.typed(text, f"{key} = {text!r}") if _holds_anything(field) else text


def _holds_anything(field: FieldInfo) -> bool:
    """True for a mapping whose values are of any kind, read as in a YAML file."""
    return typing.get_args(field.annotation)[1:] == (Any,)


def _parts(text: str) -> list[str]:
    """Items between commas; one item alone is taken as it is, blanks included, as it may be a token."""
    return [part.strip() for part in text.split(",")] if "," in text else [text]
