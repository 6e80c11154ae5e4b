"""Which backend runs a call: by device, unless one is named."""

import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch


class Entry(NamedTuple):
    """A backend's module, the devices it runs on (None: any), the module it needs and how to get it."""

    module: str
    device: str | None
    needs: str | None
    remedy: str


BACKENDS = {
    "cpu": Entry("kernels.cpu", "cpu", "kernels._cpu", "build it with `pip install --no-build-isolation -e .`"),
    "reference": Entry("kernels.eager", None, None, ""),
}
"""In order of preference."""


@cache
def is_built(name: str) -> bool:
    """Whether the backend's compiled part is installed."""
    needs = BACKENDS[name].needs
    return needs is None or find_spec(needs) is not None


def resolve(function: str, device: torch.device, name: str | None) -> Any:
    """The module that runs ``function`` on ``device``.

    Args:
        function: the public function's name, for messages.
        device: where the tensors are.
        name: a backend to force, or None to take the first of BACKENDS that runs here.

    Raises:
        ValueError: the name is unknown, or the backend does not run on this device.
        RuntimeError: the backend was not built.
    """
    if name is None:
        fitting = [key for key, entry in BACKENDS.items() if entry.device in (None, device.type)]
        name = next(key for key in fitting if is_built(key))
        if name != fitting[0]:
            _warn_not_built(fitting[0], name)
    if name not in BACKENDS:
        raise ValueError(f"{function}: backend={name!r} is not one of {', '.join(map(repr, BACKENDS))}")
    entry = BACKENDS[name]
    if entry.device not in (None, device.type):
        raise ValueError(f"{function}: backend={name!r} runs on {entry.device} tensors, hidden is on {device}")
    if not is_built(name):
        raise RuntimeError(f"{function}: backend={name!r} is not built; {entry.remedy} or use 'reference'")
    return import_module(entry.module)


@cache
def _warn_not_built(wanted: str, used: str) -> None:
    warnings.warn(
        f"kernels: backend {wanted!r} is not built; using the slower {used!r}. To get it, {BACKENDS[wanted].remedy}",
        RuntimeWarning,
        stacklevel=4,
    )
