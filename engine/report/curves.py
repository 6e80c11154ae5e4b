"""How a curve is drawn, wherever it is: which lines it has, what is smoothed, and which class of colour each has.

``svg`` puts these lines into the page and ``figures`` into the pictures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from engine.report.format import buckets
from engine.report.metrics import PHASES, Curve, stderr_of
from engine.report.records import RunFiles

Point = tuple[float, float]
"""A step, or another place, and a value."""
Kind = Literal["raw", "line", "dots"]

_MOST_POINTS = 150  # more than one point for two pixels can be neither seen nor pointed at


@dataclass(frozen=True)
class Series:
    """A named line, or the area under it. ``style`` is the class of its colour (``curve_colours``).

    ``exact`` values have no noise to smooth away; ``dots`` marks points that are few (and exact), which are no curve
    unless they are ``joined``. ``errors`` belong to the points, one each; NaN where there is none.
    """

    name: str
    points: Sequence[Point]
    style: str
    exact: bool = False
    dots: bool = False
    joined: bool = True
    errors: Sequence[float] = ()

    @property
    def errors_drawn(self) -> Sequence[float]:
        """Of each point, above and below it; NaN for all where points that have one are drawn together."""
        return self.errors if len(self.errors) == len(self.points) else [math.nan] * len(self.points)

    def strokes(self) -> Iterator[tuple[Kind, Sequence[Point]]]:
        """What is drawn, from the lowest layer up.

        Noisy values are a faint line (``raw``) under a strong one of their running mean; others are a strong line, with
        ``dots`` on top where they are few.
        """
        if self.exact or self.dots:
            if self.joined:
                yield "line", self.points
        else:
            yield "raw", self.points
            yield "line", smooth(self.points)
        if self.dots:
            yield "dots", self.points


def curve_series(run: RunFiles, curve: Curve) -> list[Series]:
    """The lines of a curve that have a point; one that has none keeps its colour."""
    lines = [
        Series(
            name,
            run.series(metric),
            f"c{index}",
            exact=curve.exact,
            dots=metric.startswith("eval/"),
            errors=_errors(run, metric),
        )
        for index, (name, metric) in enumerate(curve.metrics.items())
    ]
    return [line for line in lines if line.points]


def _errors(run: RunFiles, metric: str) -> list[float]:
    """The standard error of each point of a metric, NaN where a step has none."""
    known = dict(run.series(stderr_of(metric)))
    return [known.get(step, math.nan) for step, _ in run.series(metric)]


def phase_series(run: RunFiles, phases: Sequence[str]) -> list[Series]:
    """The seconds of each phase.

    A phase keeps its colour whichever others the run has; phases that nobody knows share the last one.
    """
    return [
        Series(
            phase,
            run.series(f"time/{phase}"),
            f"p{PHASES.index(phase) if phase in PHASES else len(PHASES) - 1}",
        )
        for phase in phases
    ]


def columns(series: Sequence[Series]) -> tuple[list[float], list[list[float]]]:
    """The steps of areas that are stacked on each other, and each one's heights; a part that a step lacks is zero."""
    known = [dict(one.points) for one in series]
    steps = sorted({step for points in known for step in points})
    return steps, [[points.get(step, 0.0) for step in steps] for points in known]


def not_below(points: Sequence[Point], low: float | None) -> list[Point]:
    """The points, those below ``low`` at it."""
    return [(step, value if low is None else max(value, low)) for step, value in points]


def thin(points: Sequence[Point]) -> list[Point]:
    """At most ``_MOST_POINTS`` points: each the mean of its neighbours, placed at their last step."""
    parts = buckets(points, _MOST_POINTS)
    return [(part[-1][0], sum(y for _, y in part) / len(part)) for part in parts]


def smooth(points: Sequence[Point]) -> list[Point]:
    """Mean over a window of about an eighth of the run, centred on each point, so that a trend is not drawn late.

    Towards the ends the window shrinks for the same reason, but keeps a quarter of its width: one step is mostly noise.
    """
    most, least = len(points) // 16, len(points) // 32
    sums = list(accumulate((y for _, y in points), initial=0.0))
    result = []
    for index, (x, _) in enumerate(points):
        reach = max(min(most, index, len(points) - 1 - index), least)
        start, end = max(index - reach, 0), min(index + reach + 1, len(points))
        result.append((x, (sums[end] - sums[start]) / (end - start)))
    return result
