"""The live panel, drawn with rich at most four times a second below whatever libraries print."""

import atexit
import logging
import math
import sys
from collections.abc import Iterator
from typing import TextIO, cast

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from engine.report.display import evaluation_line, shown
from engine.report.format import duration, sparkline
from engine.report.output import Output
from engine.report.progress import Progress, describe

_WIDEST = 132  # on a very wide terminal, longer lines would only tear the panel apart
_LABEL = 8
_CELL = 19

_STYLES = {
    "generate": "blue",
    "wait": "white",
    "sleep": "bright_blue",
    "offload": "bright_magenta",
    "reward": "yellow",
    "old": "bright_cyan",
    "ref": "cyan",
    "value": "magenta",
    "train": "green",
    "sync": "red",
    "eval": "bright_yellow",
    "save": "bright_black",
}

_TRENDS = (
    ("accuracy", "reward/accuracy", "green"),
    ("accuracy", "reward_model/accuracy", "green"),
    ("held-out", "eval/accuracy", "bright_yellow"),
    ("reward", "reward/mean", "blue"),
    ("held-out", "eval/reward", "bright_yellow"),
    ("held-out", "eval/loss", "bright_yellow"),
)

_CELLS = (
    ("KL", "kl/ref_mean", ""),
    ("entropy", "policy/entropy", ""),
    ("clipped", "policy/clip_fraction", ""),
    ("value EV", "value/explained_variance", ""),
    ("tokens/s", "tokens_per_second", ""),
    ("length", "rollout/response_tokens_mean", ""),
    ("memory", "memory/peak_gib", " GiB"),
    ("step", "time/step", " s"),
)


class LiveDisplay:
    """A panel that redraws itself, so that the clock and the phase in progress move during a long phase too."""

    def __init__(self, progress: Progress, output: Output, console: Console | None = None) -> None:
        self.progress = progress
        # Rich itself would end the process where a pipe breaks.
        self.console = console or Console(file=cast(TextIO, output))
        self._live = Live(self, console=self.console, refresh_per_second=4)
        self._handlers: list[tuple[logging.StreamHandler, object]] = []

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield panel(self.progress, min(options.max_width, _WIDEST))

    def open(self) -> None:
        """Print the header and start drawing."""
        self.console.print(Text(" · ".join(["Tandem", *describe(self.progress.header)]), style="bold"))
        before = (sys.stdout, sys.stderr)
        self._live.start()
        self._handlers = _redirect_log_handlers(before)
        # An exception that nobody reports must not leave the terminal without its cursor.
        atexit.register(self.close)

    def step(self) -> None:
        """Nothing to do: the next redraw shows it."""

    def evaluation(self) -> None:
        """Keep the evaluation's values above the panel."""
        self.message(evaluation_line(self.progress))

    def message(self, text: str) -> None:
        """Print ``text`` above the panel, as it is."""
        self.console.print(Text(text))

    def close(self) -> None:
        """Leave the last panel standing and give the terminal back."""
        atexit.unregister(self.close)
        for handler, stream in self._handlers:
            handler.setStream(stream)
        self._handlers = []
        self._live.stop()


def _redirect_log_handlers(before: tuple[TextIO, TextIO]) -> list[tuple[logging.StreamHandler, object]]:
    """Point the log handlers that write to the terminal at rich's stand-ins, which print above the panel.

    Rich replaces sys.stdout and sys.stderr, but a handler made before that (vLLM's, DeepSpeed's) holds the old stream
    (one of ``before``) and would write across the panel. Returns what to put back.
    """
    stand_ins = {id(before[0]): sys.stdout, id(before[1]): sys.stderr}
    loggers = [
        logging.getLogger(),
        *(x for x in logging.root.manager.loggerDict.values() if isinstance(x, logging.Logger)),
    ]
    changed = []
    for handler in {handler for logger in loggers for handler in logger.handlers}:
        if isinstance(handler, logging.StreamHandler) and id(handler.stream) in stand_ins:
            changed.append((handler, handler.stream))
            handler.setStream(stand_ins[id(handler.stream)])
    return changed


def panel(progress: Progress, width: int) -> Panel:
    """The whole picture of a run in at most ``width`` columns."""
    inner = width - 4
    parts: list[RenderableType] = [_progress_row(progress, inner)]
    trends = _trends(progress, inner)
    cells = _cells(progress, inner)
    phases = _phases(progress, inner)
    parts += [part for part in (trends, cells, phases) if part is not None]
    border = "bright_black" if not progress.ended else "green" if progress.ended == "done" else "red"
    return Panel(Group(*parts), title=_title(progress), title_align="left", border_style=border, width=width)


def _title(progress: Progress) -> Text:
    title = Text(f"step {progress.step}/{progress.total_steps}", style="bold")
    if progress.ended:
        title.append(f" · {progress.ended}", style="bold green" if progress.ended == "done" else "bold red")
    if progress.not_finite:
        title.append(f" · {progress.not_finite} values not finite", style="bold red")
    return title


def _progress_row(progress: Progress, width: int) -> Table:
    """Bar, share done, phase in progress, time gone and time left."""
    now = ""
    if progress.phase and not progress.ended:
        now = f"{progress.phase} {duration(progress.clock() - progress.phase_since)}"
    left = progress.seconds_left()
    row = Table.grid(padding=(0, 2, 0, 0), expand=True)
    row.add_column(ratio=1)
    row.add_column(width=4, justify="right")
    row.add_column(width=16, no_wrap=True)
    row.add_column(width=8, justify="right")
    row.add_column(width=12, justify="right", no_wrap=True)
    row.add_row(
        ProgressBar(total=max(progress.total_steps, 1), completed=progress.step),
        f"{100 * progress.step // max(progress.total_steps, 1)}%",
        Text(now, style=f"bold {_STYLES.get(progress.phase or '', 'white')}"),
        Text(duration(progress.elapsed()), style="bright_black"),
        "" if left is None else f"ETA {duration(left)}",
    )
    return row


def _trends(progress: Progress, width: int) -> Table | None:
    """Accuracy and reward over the whole run: the value now and a sparkline."""
    latest = dict(progress.metrics)
    note = ""
    if progress.evaluation:
        step, values = progress.evaluation
        latest.update(values)
        note = f"step {step}"
    grid = Table.grid(padding=(0, 2, 0, 0))
    for label, name, style in _TRENDS:
        if name in latest:
            spark = sparkline(list(progress.history.get(name, [])), width - _LABEL - 28)
            grid.add_row(
                Text(label.ljust(_LABEL), style="bright_black"),
                Text(shown(name, latest[name]).rjust(8), style="bold"),
                Text(spark, style=style),
                Text(note if name.startswith("eval/") else "", style="bright_black"),
            )
    return grid if grid.row_count else None


def _cells(progress: Progress, width: int) -> Table | None:
    """The other numbers, as many side by side as fit."""
    metrics = progress.metrics
    pairs = [(label, shown(name, metrics[name]) + unit) for label, name, unit in _CELLS if name in metrics]
    if not pairs:
        return None
    rows = math.ceil(len(pairs) / (width // _CELL or 1))
    columns = math.ceil(len(pairs) / rows)  # rows of equal length look better than full ones and a rest
    grid = Table.grid(padding=0)
    for _ in range(columns):
        grid.add_column(width=width // columns)
    texts = [Text.assemble((f"{label} ", "bright_black"), (value, "bold")) for label, value in pairs]
    for start in range(0, len(texts), columns):
        grid.add_row(*texts[start : start + columns])
    return grid


def _phases(progress: Progress, width: int) -> Text | None:
    """The last step's phases: a bar in their proportions, and their seconds."""
    phases = [(phase, seconds) for phase, seconds in progress.phase_seconds() if seconds > 0]
    if not phases:
        return None
    total = sum(seconds for _, seconds in phases)
    text = Text()
    drawn = 0
    gone = 0.0
    for phase, seconds in phases:
        gone += seconds
        end = round(gone / total * width)
        text.append("█" * (end - drawn), style=_STYLES.get(phase, "white"))
        drawn = end
    text.append("\n")
    column = 0
    for phase, seconds in phases:
        words = f" {phase} {duration(seconds)}"
        if column and column + len(words) + 1 > width:
            text.append("\n")
            column = 0
        active = phase == progress.phase and not progress.ended
        text.append("■", style=_STYLES.get(phase, "white"))
        text.append(f"{words}   ", style="bold" if active else "")
        column += len(words) + 4
    return text
