"""Grouped bars: a panel for each case, a group for each shape, a colour for each implementation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.competitors import BARE, COMPETITORS
from benchmarks.records import Record

COLOURS = {
    "tandem": "#d1495b",
    "bare": "#30343f",
    "bare-whole": "#8d99ae",
    "eager": "#edae49",
    "torch.compile": "#f3d9a4",
    "F.linear_cross_entropy": "#9c6644",
    "liger-ce": "#00798c",
    "liger-grpo": "#3aa7a3",
    "trl": "#7b5ea7",
    "cce": "#66a182",
    "quack": "#2e4057",
}
SHOWN_FAILURES = ("oom", "error")
FEW_SHAPES = 4
"""Panels with more take a line of their own."""
WIDTH, HEIGHT, MARGIN = 14.0, 3.2, 0.8
"""Inches: of the picture, of a line of panels, of legend and footer."""


def draw(records: Sequence[Record], path: Path) -> bool:
    """Write the picture; False where there is no matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("agg")
    from matplotlib import pyplot

    panels = list(dict.fromkeys((record.case, record.inputs, record.dtype) for record in records if _shown(record)))
    if not panels:
        return True
    members = {
        panel: [record for record in records if _shown(record) and (record.case, record.inputs, record.dtype) == panel]
        for panel in panels
    }
    columns = 1 if any(len(_shapes(shown)) > FEW_SHAPES for shown in members.values()) else min(2, len(panels))
    rows = -(-len(panels) // columns)
    size = (WIDTH, HEIGHT * rows + MARGIN)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axis, (panel, shown) in zip(axes.flat, members.items(), strict=False):
        _panel(axis, panel, shown)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    names = [name for name in COMPETITORS if any(record.impl == name and _shown(record) for record in records)]
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[name]) for name in names]
    figure.legend(handles, names, loc="outside upper center", ncols=min(8, len(names)), frameon=False)
    figure.supxlabel(", ".join(sorted({record.card for record in records})), fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _shown(record: Record) -> bool:
    return record.ms is not None or record.status in SHOWN_FAILURES


def _panel(axis, panel: tuple[str, str, str], records: list[Record]) -> None:
    """Milliseconds over the bare products' where there are any, so that shapes compare; both on a log scale."""
    from matplotlib.ticker import LogLocator, NullFormatter

    shapes = _shapes(records)
    names = [name for name in COMPETITORS if any(record.impl == name for record in records)]
    relative = any(record.ratio_to_bare is not None for record in records)
    names = [name for name in names if not (relative and name == BARE)]
    width = 0.84 / max(1, len(names))
    for record in records:
        if record.impl not in names:
            continue
        place = shapes.index((record.T, record.H, record.V)) + (names.index(record.impl) - (len(names) - 1) / 2) * width
        height = record.ratio_to_bare if relative else record.ms
        if height is None:
            axis.annotate(
                record.status.upper(),
                (place, 0.02),
                xycoords=("data", "axes fraction"),
                rotation=90,
                ha="center",
                va="bottom",
                fontsize=7,
            )
            continue
        axis.bar(place, height, 0.92 * width, color=COLOURS[record.impl])
        axis.annotate(
            f"{height:.2f}",
            (place, height),
            (0, 2),
            textcoords="offset points",
            rotation=90,
            ha="center",
            va="bottom",
            fontsize=6.5,
        )
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, 0.5) if relative else low / 2, 2.2 * high)
    if relative:
        axis.axhline(1, color=COLOURS[BARE], linewidth=1)
    axis.set_xlim(-0.5, max(len(shapes), FEW_SHAPES) - 0.5)
    axis.set_ylabel("time ÷ bare products" if relative else "ms")
    axis.set_xticks(range(len(shapes)), [_name(shape) for shape in shapes], fontsize=8)
    axis.set_title(" · ".join(part for part in panel if part not in ("flat", "bfloat16")), fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)


def _shapes(records: Sequence[Record]) -> list[tuple[int, int, int]]:
    return list(dict.fromkeys((record.T, record.H, record.V) for record in records))


def _name(shape: tuple[int, int, int]) -> str:
    rows, width, vocabulary = shape
    return f"T={rows}\nH={width}\nV={vocabulary}" if vocabulary else f"T={rows}"
