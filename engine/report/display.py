"""The run on the screen: a live panel on a terminal, one line a step anywhere else."""

import os
import textwrap
from collections.abc import Callable
from typing import Protocol

from engine.report.format import duration, number, percent
from engine.report.metrics import stderr_of
from engine.report.output import Output
from engine.report.progress import Progress, describe

_WIDTH = 110  # characters: more would wrap in a log viewer
_SHORT = {"generate": "gen"}


class Display(Protocol):
    """What the recorder tells a display. The state itself is in the shared ``Progress``."""

    def open(self) -> None:
        """Print the header and begin."""

    def step(self) -> None:
        """A step has finished."""

    def evaluation(self) -> None:
        """An evaluation has finished."""

    def message(self, text: str) -> None:
        """Print a text that stays."""

    def close(self) -> None:
        """Leave the screen in order; safe to call twice."""


def make_display(progress: Progress, output: Output, live: bool | None) -> Display:
    """The live display where asked for, or by default where a person is watching a terminal that can show it."""
    if live is None:
        live = can_be_live(output, dict(os.environ))
    if live:
        # rich is loaded only where it draws.
        from engine.report.live import LiveDisplay

        return LiveDisplay(progress, output)
    return PlainDisplay(progress, output)


def can_be_live(output: Output, environment: dict[str, str]) -> bool:
    """Whether ``output`` is a terminal with cursor movement and block characters, outside continuous integration."""
    return (
        output.isatty()
        and environment.get("TERM", "dumb") not in ("dumb", "unknown", "")
        and not environment.get("CI")
        and output.encoding.lower().replace("-", "") == "utf8"
    )


class PlainDisplay:
    """One aligned line a step, for log files; flushed at once, so that ``tail -f`` follows the run."""

    def __init__(self, progress: Progress, output: Output) -> None:
        self.progress = progress
        self.output = output

    def open(self) -> None:
        """Print what runs, once."""
        pieces = " | ".join(["Tandem", *describe(self.progress.header)])
        for line in textwrap.wrap(pieces, _WIDTH, subsequent_indent="  ", break_long_words=False):
            self.message(line)

    def step(self) -> None:
        """Print the step's line."""
        self.message(step_line(self.progress))

    def evaluation(self) -> None:
        """Print the evaluation's line."""
        self.message(evaluation_line(self.progress))

    def message(self, text: str) -> None:
        """Print ``text``."""
        self.output.line(text)

    def close(self) -> None:
        """Nothing to undo."""


def step_line(progress: Progress) -> str:
    """One step in at most 110 characters; a metric that the run does not have leaves its column blank."""
    metrics = progress.metrics
    line = "  ".join(
        [
            _counter("step", progress.step, progress.total_steps),
            _column("reward ", metrics.get("reward/mean"), 7)
            if "reward/mean" in metrics
            else _column("loss   ", metrics.get("policy/loss", metrics.get("reward_model/loss")), 7),
            _column("acc ", metrics.get("reward/accuracy", metrics.get("reward_model/accuracy")), 6, percent),
            _column("kl ", metrics.get("kl/ref_mean"), 7),
            _column("ent ", metrics.get("policy/entropy"), 5),
            _column("", metrics.get("tokens_per_second"), 5, unit=" tok/s"),
            _column("", metrics.get("time/step"), 6, duration),
            _column("eta ", progress.seconds_left(), 7, duration),
        ]
    )
    # The two longest phases, where there is room: they say what to tune.
    for phase, seconds in sorted(progress.phase_seconds(), key=lambda item: -item[1])[:2]:
        piece = f"  {_SHORT.get(phase, phase)} {seconds:.1f}"
        if seconds > 0 and len(line) + len(piece) <= _WIDTH:
            line += piece
    return line.rstrip()


def evaluation_line(progress: Progress) -> str:
    """An evaluation's values after the step they were taken at."""
    assert progress.evaluation is not None
    step, metrics = progress.evaluation
    values = [
        f"{name.removeprefix('eval/')} {shown(name, value)}{_precision(name, metrics)}"
        for name, value in metrics.items()
        if not any(name == stderr_of(other) for other in metrics)
    ]
    return "  ".join([_counter("eval", step, progress.total_steps), *values])


def _precision(name: str, metrics: dict[str, float]) -> str:
    stderr = metrics.get(stderr_of(name))
    return "" if stderr is None else f" (+/- {shown(name, stderr)})"


def shown(name: str, value: float) -> str:
    """A metric's value in the unit its name implies."""
    return percent(value) if name.endswith(("accuracy", "fraction")) else number(value)


def _counter(word: str, step: int, total: int) -> str:
    return f"{word} {step:>{len(str(total))}}/{total}"


def _column(label: str, value: float | None, width: int, show: Callable[[float], str] = number, unit: str = "") -> str:
    text = "" if value is None else f"{label}{show(value):>{width}}{unit}"
    return text.ljust(len(label) + width + len(unit))
