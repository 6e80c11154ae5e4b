"""Numbers as people read them. Everything here is pure and writes plain ASCII, except the sparkline."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

Item = TypeVar("Item")

_BLOCKS = "▁▂▃▄▅▆▇█"


def duration(seconds: float) -> str:
    """4.2 s, 42 s, 3m 12s, 2h 05m, 3d 04h."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def number(value: float) -> str:
    """Three significant digits in at most eight characters: 0.0123, 12.3, 12.3k; two where it is tiny: 1.2e-05."""
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 0.001:
        for suffix, unit in (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9)):
            if size < 999.5 * unit:
                return f"{value / unit:#.3g}".rstrip(".") + suffix
    return f"{value:.1e}"


def percent(fraction: float) -> str:
    """0.6237 as 62.4%."""
    return f"{100 * fraction:.1f}%"


def sparkline(values: Sequence[float], width: int) -> str:
    """The whole history in at most ``width`` block characters; each stands for the mean of its share of the steps."""
    columns = [sum(part) / len(part) for part in buckets([v for v in values if math.isfinite(v)], width)]
    if not columns:
        return ""
    low, high = min(columns), max(columns)
    if high == low:
        return _BLOCKS[0] * len(columns)
    return "".join(_BLOCKS[round((value - low) / (high - low) * (len(_BLOCKS) - 1))] for value in columns)


def buckets(values: Sequence[Item], most: int) -> list[Sequence[Item]]:
    """Cut ``values`` into at most ``most`` consecutive, nearly equal, non-empty parts."""
    parts = min(len(values), most)
    edges = [index * len(values) // parts for index in range(parts + 1)] if parts > 0 else []
    return [values[start:end] for start, end in pairwise(edges)]
