"""What a setting names of a user's own code: ``FILE.py:NAME`` or ``PACKAGE.MODULE:NAME``.

A file becomes a module that every process of the run can import by its name, which holds the file's whole path:
``engine.config.user_code.%2Fhome%2Fme%2Freward%2Epy``. So two files of the same
stem are two modules, a file may be called like a library or have dashes and spaces in its name, and a process that a
``multiprocessing`` pool starts afresh finds the file when it unpickles one of its functions.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.abc
import importlib.util
import os
import sys
import sysconfig
import traceback
import urllib.parse
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from engine.config.schema import ConfigError

PREFIX = f"{__name__}."

__path__: list[str] = []  # what makes Python look for modules below this one


def check(key: str, spec: str, kind: str) -> None:
    """Looks whether there is a file or module to import, and imports nothing.

    Args:
        key: the setting.
        spec: its value.
        kind: of what it names, such as function.

    Raises:
        ConfigError: there is none, or the value does not read as it must.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise ConfigError(f"{key} '{spec}' must read 'module:{kind}' or 'file.py:{kind}'")
    if place.endswith(".py"):
        if not os.path.exists(place):
            raise ConfigError(f"{key}: there is no '{place}'")
        return
    try:
        found = importlib.util.find_spec(place.split(".")[0])
    except ValueError:  # no name of a module
        found = None
    if found is None:
        raise ConfigError(f"{key} '{spec}': there is no module '{place}' to import; a file is named with its .py")


def load(key: str, spec: str, is_one: Callable[[object], bool]) -> tuple[ModuleType, Any]:
    """Imports what a setting names; gives the module too.

    Args:
        key: the setting.
        spec: its value.
        is_one: true for what could be meant, which a message names instead of what is not there.

    Raises:
        ConfigError: the module, the file or the name in it cannot be had; names the file, and the line where it failed.
    """
    place, _, name = spec.rpartition(":")
    try:
        module = load_file(place) if place.endswith(".py") else importlib.import_module(place)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a file may well call sys.exit where it is meant to be run by itself
        what = " ".join(traceback.format_exception_only(error)[-1].split())
        raise ConfigError(f"{key} '{spec}' cannot be imported: {_place(error)}{what}") from error
    try:
        return module, getattr(module, name)
    except AttributeError:
        raise ConfigError(f"{key} '{spec}': {place} has no '{name}'{others(module, name, is_one)}") from None


def others(module: ModuleType, name: str, is_one: Callable[[object], bool]) -> str:
    """What a module of the user has instead of ``name``, for the end of a message: the nearest name, or all."""
    names = {
        other.lower(): other
        for other, value in vars(module).items()
        if is_one(value) and not other.startswith("_") and value.__module__ == module.__name__
    }
    if near := difflib.get_close_matches(name.lower(), names, n=1):
        return f"; did you mean '{names[near[0]]}'?"
    return f"; it has {', '.join([*names.values()][:8])}" if names else ""


def _place(error: BaseException) -> str:
    """Where in the user's files an import failed; in a library if it is one that is imported."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}: "
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith("<")
    ]
    imported = [(file, line) for file, line in frames if file not in (__file__, importlib.__file__)]
    libraries = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    for file, line in [one for one in imported if not one[0].startswith(libraries)][-1:] or imported[-1:]:
        return f"{file}, line {line}: "
    return ""


def load_file(file: str) -> ModuleType:
    """Runs a Python file and gives its module, which lies in ``sys.modules`` before it runs.

    The file's own folder is the first place of ``sys.path`` while it runs, as for a script, and the last one after
    that, where it cannot hide what the run itself still imports. What the file raises passes through.
    """
    name = PREFIX + urllib.parse.quote(os.fsencode(Path(file).resolve()), safe="").replace(".", "%2E")
    sys.modules.pop(name, None)  # of an earlier run in this process
    return importlib.import_module(name)


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        folder = str(Path(self.path).parent)
        sys.path.insert(0, folder)
        try:
            super().exec_module(module)
        finally:
            sys.path.remove(folder)
            if folder not in sys.path:
                sys.path.append(folder)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(PREFIX):
            return None
        file = os.fsdecode(urllib.parse.unquote_to_bytes(fullname.removeprefix(PREFIX)))
        return importlib.util.spec_from_file_location(fullname, file, loader=_Loader(fullname, file))


sys.meta_path.append(_Finder())
