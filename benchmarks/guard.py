"""Failures are results: they are caught, what they held is freed, and the rest goes on."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from benchmarks.competitors import Unavailable

Value = TypeVar("Value")


class Failure(NamedTuple):
    """Why there is no number: "oom", "error", or the status of an Unavailable."""

    status: str
    detail: str


def attempt(call: Callable[[], Value]) -> Value | Failure:
    """What the call gives, or why it does not."""
    try:
        return call()
    except Unavailable as reason:
        return Failure(reason.status, reason.detail)
    except Exception as error:
        short = isinstance(error, torch.OutOfMemoryError | MemoryError) or "out of memory" in str(error)
        failure = Failure("oom" if short else "error", f"{type(error).__name__}: {_first_line(error)}")
    # Only here is the traceback gone, and with it the tensors of the frames that it held.
    release()
    return failure


def release() -> None:
    """Give memory back that nothing refers to."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
