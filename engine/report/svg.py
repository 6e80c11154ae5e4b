"""Charts as inline SVG, put on paper without any library: lines, and areas stacked on each other.

Every chart carries one invisible strip for each point. Pointing at (or tapping) a strip shows its values, in CSS alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise

from engine.report.curves import Point, Series, columns, not_below, thin
from engine.report.format import number, percent

Show = Callable[[float], str]
Mark = tuple[str, float, float]  # text, size, height at which to put a dot (NaN: none)

WIDTH, HEIGHT = 380, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 20, 22


def step_name(x: float) -> str:
    """What a place on the axis of steps is called."""
    return f"step {x:.0f}"


def line_chart(
    series: Sequence[Series],
    show: Show,
    *,
    from_zero: bool = False,
    low: float | None = None,
    place: Show = step_name,
    axis: str = "",
) -> str:
    """Lines over the steps: each point as a faint line and its running mean as a strong one.

    ``place`` says what a point's place is called, and ``axis`` what it is measured in, where the axis is not that of
    steps.
    """
    thinned = [replace(s, points=not_below(thin(s.points), low)) for s in series if s.points]
    values = [y for s in thinned for _, y in s.points] + ([0.0] if from_zero else [])
    for s in thinned:
        ends = zip(s.points, s.errors_drawn, strict=True)
        values += [y + end for (_, y), error in ends if math.isfinite(error) for end in (-error, error)]
    frame = _Frame.around([x for s in thinned for x, _ in s.points], values)
    drawn = []
    for s in thinned:
        for kind, points in s.strokes():
            if kind == "dots":
                drawn += [
                    f'<circle class="dot {s.style}" cx="{frame.x(x)}" cy="{frame.y(y)}" r="3"/>' for x, y in points
                ]
            else:
                drawn.append(f'<path class="{kind} {s.style}" d="{frame.path(points)}"/>')
        drawn += [_whisker(frame, s.style, x, y, error) for (x, y), error in zip(s.points, s.errors_drawn, strict=True)]
    marks: dict[float, list[Mark]] = {}
    for s in thinned:
        for (x, y), error in zip(s.points, s.errors_drawn, strict=True):
            about = f" ± {show(error)}" if math.isfinite(error) else ""
            marks.setdefault(x, []).append((f"{s.name} {show(y)}{about}", y, y))
    if axis:
        right, foot = WIDTH - _RIGHT, HEIGHT - _BOTTOM - 5
        drawn.append(f'<text class="tick" x="{right}" y="{foot}" text-anchor="end">{escape(axis)}</text>')
    return _svg(frame, show, drawn, _strips(frame, marks, place=place))


def _whisker(frame: "_Frame", style: str, x: float, y: float, error: float) -> str:
    if not math.isfinite(error):
        return ""
    return f'<path class="raw {style}" d="M{frame.x(x)} {frame.y(y - error)}V{frame.y(y + error)}"/>'


def stacked_chart(series: Sequence[Series], show: Show) -> str:
    """Areas on top of each other, for parts of a whole."""
    steps, every_height = columns(series)
    heights = [thin(list(zip(steps, column, strict=True))) for column in every_height]
    xs = [x for x, _ in heights[0]]
    base = [0.0] * len(xs)
    areas = []
    marks: dict[float, list[Mark]] = {x: [] for x in xs}
    tops = [sum(column[i][1] for column in heights) for i in range(len(xs))]
    frame = _Frame.around(xs, [0.0, *tops])
    for s, column in zip(series, heights, strict=True):
        top = [low + y for low, (_, y) in zip(base, column, strict=True)]
        edge = frame.path(list(zip(xs, top, strict=True)))
        back = frame.path(list(zip(xs, base, strict=True))[::-1]).replace("M", "L")
        areas.append(f'<path class="area {s.style}" d="{edge}{back}Z"/>')
        for x, (_, y) in zip(xs, column, strict=True):
            if y > 0:
                marks[x].append((f"{s.name} {show(y)}", y, math.nan))
        base = top
    for x, total in zip(xs, tops, strict=True):
        # The label has room for the three longest; the title that a mouse waits for names them all.
        marks[x].sort(key=lambda mark: -mark[1])
        marks[x].insert(0, (f"{show(total)}:", total, total))
    return _svg(frame, show, areas, _strips(frame, marks, in_label=4))


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) from at or below ``low`` to at or above ``high``."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


@dataclass(frozen=True)
class _Frame:
    """The axes: data coordinates in, pixels out."""

    x_ticks: list[float]
    y_ticks: list[float]
    x_low: float
    x_high: float

    @staticmethod
    def around(xs: Sequence[float], ys: Sequence[float]) -> "_Frame":
        low, high = min(ys), max(ys)
        if high - low <= 1e-9 * max(abs(low), abs(high)):
            # A flat line gets some air, so that it has a scale at all.
            air = abs(high) * 0.1 or 1.0
            low, high = (low - air, high + air) if low else (0.0, high + air)
        x_low, x_high = min(xs), max(xs)
        x_ticks = [x for x in ticks(x_low, x_high, 5) if x_low <= x <= x_high] if x_high > x_low else [x_low]
        if all(isinstance(x, int) for x in xs):  # steps
            x_ticks = sorted({round(x) for x in x_ticks if abs(x - round(x)) < 1e-6})
            x_high = max(x_high, x_low + 1)
        return _Frame(x_ticks, ticks(low, high, 5), x_low, x_high if x_high > x_low else x_low + 1)

    def x(self, value: float) -> float:
        return round(_LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return round(HEIGHT - _BOTTOM - (value - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM), 1)

    def path(self, points: Sequence[Point]) -> str:
        return "M" + "L".join(f"{self.x(x)} {self.y(y)}" for x, y in points)


def _svg(frame: _Frame, show: Show, drawn: list[str], strips: list[str]) -> str:
    grid = []
    for value in frame.y_ticks:
        y = frame.y(value)
        grid.append(f'<path class="grid" d="M{_LEFT} {y}H{WIDTH - _RIGHT}"/>')
        grid.append(
            f'<text class="tick" x="{_LEFT - 6}" y="{y + 3.5}" text-anchor="end">{escape(_tick(value, show))}</text>'
        )
    for x in frame.x_ticks:
        label = x if isinstance(x, int) else f"{x:.6g}"
        grid.append(f'<text class="tick" x="{frame.x(x)}" y="{HEIGHT - 6}" text-anchor="middle">{label}</text>')
    body = "".join([*grid, *drawn, *strips])
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{body}</svg>'


def _tick(value: float, show: Show) -> str:
    """A tick's label: as exact as it must be to differ from its neighbours, without zeros that say nothing."""
    if show is percent:
        return f"{100 * value:.6g}%"
    if show is number and abs(value) < 1000:
        return f"{value:.6g}"
    text = show(value)
    digits = text.rstrip("kMGs ")
    return digits.rstrip("0").rstrip(".") + text[len(digits) :] if "." in digits else text


def _strips(frame: _Frame, marks: dict[float, list[Mark]], in_label: int = 3, place: Show = step_name) -> list[str]:
    """For each step, or other place, an invisible strip with its title, label and the points it marks (NaN: none)."""
    steps = sorted(marks)
    places = [frame.x(step) for step in steps]
    edges = [_LEFT, *((a + b) / 2 for a, b in pairwise(places)), WIDTH - _RIGHT]
    strips = []
    for index, step in enumerate(steps):
        texts = [text for text, _, _ in marks[step]]
        dots = "".join(
            f'<circle cx="{places[index]}" cy="{frame.y(at)}" r="3.5"/>'
            for _, _, at in marks[step]
            if math.isfinite(at)
        )
        label = escape(f"{place(step)}   " + "   ".join(texts[:in_label]))
        strips.append(
            f'<g class="at"><title>{escape(f"{place(step)}: " + ", ".join(texts).replace(":,", ":"))}</title>'
            f'<rect x="{edges[index]:.1f}" y="{_TOP}" width="{max(edges[index + 1] - edges[index], 0.5):.1f}"'
            f' height="{HEIGHT - _TOP - _BOTTOM}"/>{dots}'
            f'<text x="{WIDTH - _RIGHT}" y="11" text-anchor="end">{label}</text></g>'
        )
    return strips
