"""curves.png and details.png: the page's curves for papers, issues and chats, put on paper by matplotlib."""

from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from engine.report.curve_colours import on_white
from engine.report.curves import Series, columns, curve_series, not_below, phase_series
from engine.report.format import percent
from engine.report.metrics import CURVES, PHASE_TITLE, Curve, phases_in
from engine.report.records import RunFiles


def write_figures(run: RunFiles, run_dir: Path) -> None:
    """Write the pictures whose curves have at least one point."""
    curves = [curve for curve in CURVES if any(run.series(metric) for metric in curve.metrics.values())]
    main = [curve for curve in curves if curve.title in ("Accuracy", "Reward")]
    rest = [curve for curve in curves if curve not in main]
    phases = phases_in(run.names())
    if main:
        # 1200 x 420 pixels, whether one curve or two: a README shows it in full width.
        figure, axes = _grid(len(main), columns=len(main), size=(8.0, 2.8))
        for place, curve in zip(axes, main, strict=True):
            _draw(place, run, curve)
            place.set_xlabel("step", fontsize=8, color="#63635e")
        _save(figure, run, run_dir / "curves.png")
    if rest or phases:
        count = len(rest) + bool(phases)
        figure, axes = _grid(count, columns=3, size=(12.0, 0.4 + 2.7 * -(-count // 3)))
        for place, curve in zip(axes, rest, strict=False):
            _draw(place, run, curve)
        if phases:
            _draw_phases(axes[len(rest)], run, phases)
        _save(figure, run, run_dir / "details.png")


def title(run: RunFiles) -> str:
    """What ran on what: a picture is looked at far from its folder, whose name would say nothing there."""
    words = " · ".join(word for word in (run.algo, Path(run.data).name) if word) or run.name
    return f"{words} (ended by an error)" if run.crash else words


def _grid(count: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """``count`` axes in rows of ``columns``, in a figure of ``size`` inches.

    No pyplot: it keeps state, and may try to open a window.
    """
    rows = -(-count // columns)
    figure = Figure(figsize=size, layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(rows, columns, index + 1) for index in range(count)]


def _draw(axes: Axes, run: RunFiles, curve: Curve) -> None:
    for series in curve_series(run, curve):
        plot(axes, replace(series, points=not_below(series.points, curve.low)))
    if curve.from_zero:
        axes.set_ylim(0, max(axes.get_ylim()[1], 1.1 * axes.dataLim.y1) or 1.0)
    if curve.show is percent:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))
    if len(axes.get_legend_handles_labels()[1]) > 1:
        # Beside the title, where it covers no curve.
        axes.legend(
            frameon=False, fontsize=8, ncols=2, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0, borderpad=0.3
        )
    dress(axes, curve.title)


def plot(axes: Axes, series: Series) -> None:
    """Draws one named line, noise and running mean, or points and what joins them."""
    colour, name = on_white(series.style), series.name
    for kind, points in series.strokes():
        steps, values = zip(*points, strict=True)
        if kind == "raw":
            axes.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
        elif kind == "dots":
            axes.errorbar(steps, values, series.errors_drawn, fmt="o-", color=colour, markersize=4, label=name)
        elif not series.dots:  # else their own line joins them
            axes.plot(steps, values, color=colour, linewidth=2, label=name)


def _draw_phases(axes: Axes, run: RunFiles, phases: list[str]) -> None:
    areas = phase_series(run, phases)
    steps, heights = columns(areas)
    axes.stackplot(steps, heights, labels=phases, colors=[on_white(area.style) for area in areas])
    axes.legend(frameon=False, fontsize=7, ncols=3, loc="upper left")
    axes.set_ylim(0, 1.35 * axes.dataLim.y1 or 1.0)
    dress(axes, PHASE_TITLE)


def dress(axes: Axes, title: str) -> None:
    """A title, and as few lines beside the curves as can be."""
    axes.set_title(title, fontsize=10, loc="left", fontweight="bold")
    axes.tick_params(labelsize=8, length=0)
    axes.grid(axis="y", color="#e3e3de", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#c9c9c3")


def _save(figure: Figure, run: RunFiles, path: Path) -> None:
    # A name may hold a dollar sign, which matplotlib would read as mathematics.
    figure.suptitle(title(run).replace("$", r"\$"), fontsize=10, color="#63635e")
    figure.savefig(path)
