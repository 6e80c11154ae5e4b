"""YAML without its traps: a key given twice is refused, and numbers are read as people write them.

PyYAML keeps the last of two equal keys, takes 010 for eight and 1:30 for ninety, and follows aliases that multiply.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import yaml

from engine.config import ConfigError

MOST_NODES = 100_000
"""Nodes of a file with every alias written out; real configurations have hundreds."""
_STRING, _MERGE, _INT, _FLOAT = (f"tag:yaml.org,2002:{name}" for name in ("str", "merge", "int", "float"))


class _Loader(yaml.SafeLoader):
    """SafeLoader but for octal and base-60 numbers, which stay text, and exponents without a point, which are floats:
    1e-6 is a number in JSON and in YAML 1.2."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag not in (_INT, _FLOAT)]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_INT, re.compile(r"[-+]?(0|[1-9][0-9_]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(r"[-+]?(\d[\d_]*\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"),
    list("-+.0123456789"),
)


def read(path: str) -> dict[str, Any]:
    """A configuration file as a nested mapping; an empty one is an empty mapping.

    A dotted key at the top (``train.steps: 5``) is the nested one. The values of ``env`` are text as written.

    Raises:
        ConfigError: names the file, and the line where there is one.
    """
    where = f"--config {path}"
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{where}: not YAML: not UTF-8 text ({error})") from None
    tree = _load(text, _Loader, where)
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{where}: must be a mapping of sections, not a {type(tree).__name__}")
    for key in [key for key in tree if "." in key]:
        assign(tree, key, tree.pop(key))
    return tree


def value(text: str, where: str) -> Any:
    """A list or mapping of the command line, whose items are all text; ``where`` names it in messages."""
    return _load(text, yaml.BaseLoader, where)


def typed(text: str, where: str) -> Any:
    """A value of the command line as it would be read in a file: a number, true, null, text, a list or mapping."""
    return _load(text, _Loader, where)


def assign(tree: dict[str, Any], key: str, item: Any) -> None:
    """Sets a dotted key; an empty section on the way becomes a mapping."""
    *sections, leaf = key.split(".")
    for section in sections:
        if tree.get(section) is None:
            tree[section] = {}
        tree = tree[section]
        if not isinstance(tree, dict):
            raise ConfigError(f"{section} = {tree!r}: is a section; give its keys")
    tree[leaf] = item


def _load(text: str, loader_class: Any, where: str) -> Any:
    loader = None
    try:
        loader = loader_class(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if isinstance(node, yaml.MappingNode):
            for key, section in node.value:
                if key.value == "env" and isinstance(section, yaml.MappingNode):
                    _as_written(part for pair in section.value for part in pair)
                elif str(key.value).startswith("env."):
                    _as_written([section])
        _Checker(where).size(node, "")
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        reason = ", ".join(filter(None, (getattr(error, part, None) for part in ("context", "problem")))) or error
        raise ConfigError(f"{where}{line}: not YAML: {reason}") from None
    except RecursionError:
        raise ConfigError(f"{where}: not a configuration: nested too deeply") from None
    except ValueError as error:  # what a tag such as !!int asks for
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where}: not YAML: {error}") from None
    finally:
        if loader is not None:
            loader.dispose()


def _as_written(nodes: Iterable[yaml.Node]) -> None:
    """Makes them text: a variable that is set to yes must not become True."""
    for node in nodes:
        if isinstance(node, yaml.ScalarNode) and node.tag != _MERGE:
            node.tag = _STRING


class _Checker:
    """Looks at a document before anything is made of it."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._lines: dict[str, int] = {}
        self._sizes: dict[int, int] = {}

    def size(self, node: yaml.Node, path: str) -> int:
        """Nodes of this one with aliases written out; refuses what is wrong in it."""
        if (known := self._sizes.get(id(node))) is not None:
            if known == 0:
                self._refuse(node, "an alias stands inside what it names")
            return known
        self._sizes[id(node)] = 0  # until it is known
        total = 1
        if isinstance(node, yaml.MappingNode):
            for key, item in node.value:
                total += self.size(item, self._key(key, path))
        elif isinstance(node, yaml.SequenceNode):
            total += sum(self.size(item, f"{path}[{place}]") for place, item in enumerate(node.value))
        if total > MOST_NODES:
            self._refuse(node, f"more than {MOST_NODES} values, its aliases written out")
        self._sizes[id(node)] = total
        return total

    def _key(self, key: yaml.Node, path: str) -> str:
        if not isinstance(key, yaml.ScalarNode) or key.tag not in (_STRING, _MERGE):
            written = f" '{key.value}'" if isinstance(key, yaml.ScalarNode) else ""
            self._refuse(key, f"the key{written} is no name: put it in quotes if it is one")
        full = f"{path}.{key.value}" if path else str(key.value)
        line = key.start_mark.line + 1
        if full in self._lines:
            first = self._lines[full]
            lines = f"lines {first} and {line}" if first != line else f"line {line}"
            raise ConfigError(f"{self._where}: '{full}' is given twice, on {lines}: keep one")
        self._lines[full] = line
        return full

    def _refuse(self, node: yaml.Node, why: str) -> None:
        raise ConfigError(f"{self._where}, line {node.start_mark.line + 1}: {why}")
