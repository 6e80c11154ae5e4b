"""Which backend runs a call: by device and by what it has, unless one is named."""

import os
import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch


class Entry(NamedTuple):
    """A backend's module, the devices it runs on (None: any), the modules it needs and how to get them."""

    module: str
    device: str | None
    needs: tuple[str, ...]
    remedy: str


BACKENDS = {
    "triton": Entry(
        "kernels.triton", "cuda", ("triton", "kernels.triton"), "install triton (pip install triton==3.6.0)"
    ),
    "cpu": Entry("kernels.cpu", "cpu", ("kernels._cpu",), "build it with `pip install --no-build-isolation -e .`"),
    "reference": Entry("kernels.eager", None, (), ""),
}
"""In order of preference."""

RESERVED = {"cuda": "CUDA C++ for Hopper, which does not exist yet; use 'triton'"}
"""Names that are spoken for."""

PARTS = {"add_rms_norm": "add_rms_norm", "gae": "gae", "linear_kl": "linear_kl"}
"""The part of a backend (kernels/head.py) that a public function needs, where it is not ``make_scanner``."""


@cache
def is_built(name: str) -> bool:
    """Whether what the backend needs is installed."""
    return all(find_spec(needed) is not None for needed in BACKENDS[name].needs)


def runs_on(name: str, device: torch.device) -> bool:
    """Whether the backend takes tensors on this device, if it is built."""
    return BACKENDS[name].device in (None, device.type)


def resolve(function: str, device: torch.device, name: str | None) -> Any:
    """The module that runs ``function`` on ``device``.

    Args:
        function: the public function's name.
        device: where the tensors are.
        name: a backend to force, or None to take the first of BACKENDS that runs here and has the function. One that is
            not built is passed over with a warning, one that lacks the function without.

    Raises:
        ValueError: the name is unknown, or the backend does not run on this device or has no such function.
        RuntimeError: the backend was not built.
    """
    if name is not None:
        return _named(function, device, name)
    missing = None
    for key in BACKENDS:
        if not runs_on(key, device):
            continue
        if not is_built(key):
            missing = missing or key
        elif (module := _with_function(function, key)) is not None:
            if missing is not None:
                _warn_not_built(missing, key)
            return module
    raise AssertionError("'reference' has every function")


def _named(function: str, device: torch.device, name: str) -> Any:
    if name in RESERVED:
        raise RuntimeError(f"{function}: backend={name!r} is not built: it is reserved for {RESERVED[name]}")
    if name not in BACKENDS:
        raise ValueError(f"{function}: backend={name!r} is not one of {', '.join(map(repr, BACKENDS))}")
    if not runs_on(name, device) and not _is_interpreted(name, device):
        interpreter = ", and on the CPU only with TRITON_INTERPRET=1" if name == "triton" else ""
        raise ValueError(
            f"{function}: backend={name!r} runs on {BACKENDS[name].device} tensors{interpreter}; hidden is on {device}"
        )
    if not is_built(name):
        raise RuntimeError(f"{function}: backend={name!r} is not built; {BACKENDS[name].remedy} or use 'reference'")
    module = _with_function(function, name)
    if module is None:
        raise ValueError(f"{function}: backend={name!r} has no {function}; leave backend out or use 'reference'")
    return module


def _is_interpreted(name: str, device: torch.device) -> bool:
    """Triton's interpreter runs on the CPU, slowly: for tests, and only by name."""
    return name == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


def _with_function(function: str, name: str) -> Any | None:
    module = import_module(BACKENDS[name].module)
    return module if hasattr(module, PARTS.get(function, "make_scanner")) else None


@cache
def _warn_not_built(wanted: str, used: str) -> None:
    warnings.warn(
        f"kernels: backend {wanted!r} is not built; using the slower {used!r}. To get it, {BACKENDS[wanted].remedy}",
        RuntimeWarning,
        stacklevel=4,
    )
