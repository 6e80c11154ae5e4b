"""What an evaluation leaves: a table, evaluation.json, and the picture of win rate against KL."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from engine.evaluation.judging import Judged
from engine.report import curve_colours, records
from engine.report.curves import Series
from engine.report.format import number, percent
from engine.report.style import CSS
from engine.report.svg import line_chart

JSON, PAGE, PICTURE = "evaluation.json", "evaluation.html", "win-rate-kl.svg"
TITLES = {
    "win_rate": "win rate",
    "ties": "ties",
    "normalised": "score - baseline",
    "score": "score",
    "accuracy": "accuracy",
    "dropped": "dropped",
    "kl": "KL",
    "perplexity": "perplexity",
    "tokens": "tokens",
    "stopped": "stopped",
}
SHARES = ("win_rate", "ties", "accuracy", "dropped", "stopped")


def table(models: Sequence[Judged]) -> list[list[str]]:
    """A row of titles and one of each model: its name, and every figure with its standard error."""
    seen = dict.fromkeys(name for one in models for name in one.figures)
    names = [name for name in TITLES if name in seen]
    at = 1 + names.index("accuracy") if "accuracy" in names else len(names)
    names[at:at] = [name for name in seen if name.startswith("pass@")]
    rows = [["model", *(TITLES.get(name, name) for name in names)]]
    for one in models:
        rows.append([one.place.name, *(_cell(one, name) for name in names)])
    return rows


def _cell(one: Judged, name: str) -> str:
    figure = one.figures.get(name)
    if figure is None:
        return ""
    show = percent if name in SHARES or name.startswith("pass@") else number
    return f"{show(figure.value)} ± {show(figure.stderr)}" if figure.prompts > 1 else show(figure.value)


def as_text(rows: Sequence[Sequence[str]]) -> str:
    """The table in columns; numbers end in line."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([name.ljust(widths[0]), *numbers]).rstrip())
    return "\n".join(lines)


def write(folder: Path, models: Sequence[Judged], about: dict[str, Any]) -> None:
    """Writes the files, each under another name first.

    Args:
        about: how the evaluation was made, for evaluation.json; ``baseline`` is said in the picture too.
    """
    found = [
        {
            "name": one.place.name,
            "path": one.place.path,
            "step": one.place.step,
            "figures": {
                name: {"value": figure.value, "stderr": figure.stderr, "prompts": figure.prompts}
                for name, figure in one.figures.items()
            },
        }
        for one in models
    ]
    records.write_atomically(folder / JSON, records.json_text(about | {"models": found}))
    chart = picture(models)
    if chart:
        style = f"<style>{CSS}{curve_colours.style_sheet()}</style>"
        alone = chart.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(">", f">{style}", 1)
        records.write_atomically(folder / PICTURE, alone)
    records.write_atomically(folder / PAGE, page(models, chart, about))


def picture(models: Sequence[Judged]) -> str:
    """The win rate of each model over its KL to the reference; nothing for fewer than two.

    Models of known steps are joined to a curve, in the order given.
    """
    shown = [one for one in models if {"win_rate", "kl"} <= one.figures.keys()]
    if len(shown) < 2:
        return ""
    curve = [one for one in shown if one.place.step is not None]
    others = [one for one in shown if one.place.step is None]
    names = {one.figures["kl"].value: one.place.name for one in shown}
    drawn = [_series("win rate", curve, "c0", True), _series("win rate", others, "c1", False)]
    axis = "KL, nats a response"
    return line_chart(drawn, percent, place=lambda kl: f"{names.get(kl, '')}, KL {number(kl)}", axis=axis)


def _series(name: str, models: Sequence[Judged], style: str, joined: bool) -> Series:
    points = [(one.figures["kl"].value, one.figures["win_rate"].value) for one in models]
    errors = [one.figures["win_rate"].stderr for one in models]
    return Series(name, points, style, dots=True, joined=joined, errors=errors)


def page(models: Sequence[Judged], chart: str, about: dict[str, Any]) -> str:
    """One self-contained page with the picture and the table."""
    head, *rows = table(models)
    cells = "".join(f"<th>{escape(title)}</th>" for title in head)
    body = "".join(
        "<tr>"
        + "".join(f'<td data-label="{escape(t)}">{escape(c)}</td>' for t, c in zip(head, row, strict=True))
        + "</tr>"
        for row in rows
    )
    note = (
        f"Share of prompts with a better response than that of {about['baseline']}, with standard errors over prompts, "
        f"against the KL to {about['reference']} in nats a response."
    )
    title = '<div class="head"><h3>Win rate against KL</h3></div>'
    figure = f'<figure>{title}<p class="soft">{escape(note)}</p>{chart}</figure>' if chart else ""
    facts = f"{about['prompts']} prompts · judge {about['judge']} · baseline {about['baseline']}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Evaluation · Tandem</title><style>{CSS}{curve_colours.style_sheet()}</style></head>\n<body>\n"
        f'<header><h1>Evaluation</h1><p class="soft facts">{escape(facts)}</p></header>\n'
        f"{figure}\n<h2>Figures</h2><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>\n</body></html>\n"
    )
