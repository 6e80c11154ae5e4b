"""A user's Python file as a module that every process of the run can import by its name.

The name holds the file's whole path: ``engine.rewards.user_code.%2Fhome%2Fme%2Freward%2Epy``. So two files of the same
stem are two modules, a file may be called like a library or have dashes and spaces in its name, and a process that a
``multiprocessing`` pool starts afresh finds the file when it unpickles one of its functions.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import sys
import urllib.parse
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType

PREFIX = f"{__name__}."

__path__: list[str] = []  # what makes Python look for modules below this one


def load(file: str) -> ModuleType:
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
