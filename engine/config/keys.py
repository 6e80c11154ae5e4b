"""The dotted keys of the configuration tree: what there is, what kind of value each takes, which one was meant."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from engine.config import Config, Section

FORMS: dict[type, str] = {
    list: "a,b or [a, b] (with quotes where a comma belongs to an item: ['a', ',b'])",
    tuple: "a,b or [a, b]",
    dict: "name=value,name=value or {name: value}, or one item by --KEY.name value",
}
"""How values of several parts are written, for messages and ``--help``."""


def leaves(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every leaf of a tree as (dotted key, field)."""
    for name, field in section.model_fields.items():
        if (inner := section_of(field)) is not None:
            yield from leaves(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section that a field is, if it is one."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def container(field: FieldInfo) -> type | None:
    """``list``, ``tuple`` or ``dict`` for a leaf that holds several values."""
    origin = typing.get_origin(field.annotation)
    return origin if origin in FORMS else None


def items_of(field: FieldInfo) -> type[Section] | None:
    """The section that each item of a list is, if it is one."""
    inner = typing.get_args(field.annotation)[:1] if container(field) is list else ()
    return inner[0] if inner and isinstance(inner[0], type) and issubclass(inner[0], Section) else None


def is_item(tree: type[Section], key: str) -> bool:
    """True for one item of a mapping, such as reward.weights.model."""
    mappings = (leaf for leaf, field in leaves(tree) if container(field) is dict)
    return any(key.startswith(f"{leaf}.") and key != f"{leaf}." for leaf in mappings)


def form(tree: type[Section], key: str) -> str:
    """What to add to a message about a value of several parts, or about one of the parts."""
    for leaf, field in leaves(tree):
        if (inner := items_of(field)) and f"{key}.".startswith(f"{leaf}."):
            return f"; it reads [{{key: value, ...}}, ...] with the keys {', '.join(inner.model_fields)}"
        if (kind := container(field)) and f"{key}.".startswith(f"{leaf}."):
            return f"; it reads {FORMS[kind].replace('KEY', leaf)}"
    return ""


def unknown(tree: type[Section], key: str) -> str:
    """One line for a key that does not exist, with the nearest ones that do, those of its own section first."""
    for name, field in leaves(tree):
        if (inner := items_of(field)) and key.startswith(f"{name}."):
            return f"unknown key '{key}'; an item of {name} has the keys {', '.join(inner.model_fields)}"
    section, _, leaf = key.rpartition(".")
    known = {name: name.rpartition(".") for name, _ in leaves(tree)}
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


def type_name(annotation: Any) -> str:
    """A short name of a leaf's type for ``--help``, or the form of its value."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return "{" + ",".join(str(a) for a in args) + "}"
    if origin is typing.Annotated:
        return type_name(args[0])
    if origin in FORMS:
        of_sections = args and isinstance(args[0], type) and issubclass(args[0], Section)
        return "NAME=VALUE,..." if origin is dict else "[{KEY: VALUE,...},...]" if of_sections else "A,B,..."
    if args:
        return "|".join(type_name(a) for a in args if a is not type(None))
    return str(getattr(annotation, "__name__", annotation)).upper()
