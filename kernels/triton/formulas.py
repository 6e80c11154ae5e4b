"""The formulas of kernels/token_losses.py as Triton functions."""

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import triton
import triton.language as tl


@cache
def compiled(formula: Callable[..., Any]) -> Any:
    """The same code as a function that kernels can call.

    A function looks the names that it uses up in its module. This one looks them up in a dictionary, where ``op`` is
    ``triton.language`` instead of torch, other formulas are compiled and numbers are constants, as Triton wants them.
    """
    assert isinstance(formula, FunctionType)
    names: dict[str, Any] = {"op": tl}
    for name in formula.__code__.co_names:
        value = formula.__globals__.get(name)
        if isinstance(value, FunctionType):
            names[name] = compiled(value)
        elif isinstance(value, float):
            names[name] = tl.constexpr(value)
    copy = FunctionType(formula.__code__, names, formula.__name__)
    copy.__module__ = formula.__module__
    return triton.jit(copy)
