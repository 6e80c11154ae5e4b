"""report.html: one self-contained page about a run, made only from the files in its folder."""

from html import escape
from pathlib import Path
from typing import Any

from engine.report import curve_colours, records
from engine.report.closing import LESS_IS_BETTER, MEASURES, compared, precision
from engine.report.curves import curve_series, phase_series
from engine.report.format import duration, number
from engine.report.metrics import CURVES, PHASE_NOTE, PHASE_TITLE, Curve, other_metrics, phases_in, stderr_of
from engine.report.records import RunFiles, load_run
from engine.report.samples import sample_sections
from engine.report.style import CSS
from engine.report.svg import line_chart, stacked_chart


def write_report(run_dir: Path) -> Path:
    """Write report.html, curves.png and details.png into ``run_dir``; returns the page's path.

    Works on a finished, a crashed and a running run, with whatever files there are. The page comes first, so that a
    problem in drawing the pictures cannot cost it.
    """
    run = load_run(run_dir)
    path = run_dir / records.REPORT
    records.write_atomically(path, page(run))
    # matplotlib takes a second to load and the page does without it.
    from engine.report.figures import write_figures

    write_figures(run, run_dir)
    return path


def page(run: RunFiles) -> str:
    """The whole page."""
    title = escape(run.name)
    body = [
        _heading(run),
        _banner(run),
        _cards(run),
        _charts(run),
        sample_sections(run),
        _setup(run),
    ]
    style = CSS + curve_colours.style_sheet()
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title} · Tandem</title><style>{style}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _heading(run: RunFiles) -> str:
    seed = run.summary.get("seed", run.config.get("seed"))
    facts = [
        run.algo,
        run.setting("model", "path"),
        run.data,
        run.setting("generation", "backend"),
        f"seed {seed}" if seed is not None else None,
    ]
    line = " · ".join(escape(str(fact)) for fact in facts if fact)
    return f'<header><h1>{escape(run.name)}</h1><p class="soft facts">{line}</p></header>'


def _banner(run: RunFiles) -> str:
    """What a reader must know before the numbers: a crash, an unfinished run, notes, values that were not finite."""
    banners = []
    if run.crash:
        what, _, trace = run.crash.partition("\n\n")
        verb = "was stopped by hand" if what.startswith("KeyboardInterrupt") else "crashed"
        banners.append(
            f'<div class="banner bad"><strong>This run {verb}.</strong><pre>{escape(what)}</pre>'
            f"<details><summary>Traceback</summary><pre>{escape(trace)}</pre></details></div>"
        )
    elif not run.summary:
        banners.append(
            '<div class="banner">This run has no summary: it was still going when this page was made, or it was killed.'
            "</div>"
        )
    banners += [
        f'<div class="banner"><strong>From step {note["step"]} on:</strong> {escape(str(note["note"]))}</div>'
        for note in run.notes
    ]
    lost = [
        f"{escape(name)} at {len(steps)} step{'s' if len(steps) > 1 else ''} (first: {steps[0]})"
        for name, steps in run.not_finite().items()
    ]
    if lost:
        banners.append(f'<div class="banner bad"><strong>NaN or infinite:</strong> {"; ".join(lost)}.</div>')
    return "\n".join(banners)


def _cards(run: RunFiles) -> str:
    """The numbers people look for first: from the summary, or from the metrics where a run did not get that far."""
    steps = [record["step"] for record in run.metrics]
    speed, memory = _values(run, "tokens_per_second"), _values(run, "memory/peak_gib")
    cards = [_outcome_card(run)]
    done = _known(run, "steps", max(steps, default=None))
    if done is not None:
        episodes = run.summary.get("episodes")
        cards.append(_card("Steps", str(done), f"{episodes:,} episodes" if isinstance(episodes, int) else ""))
    seconds = _known(run, "seconds", sum(_values(run, "time/step")) or None)
    if seconds is not None:
        cards.append(_card("Time", duration(seconds), f"{duration(seconds / done)} a step" if done else ""))
    rate = _known(run, "tokens_per_second", sum(speed) / len(speed) if speed else None)
    if rate is not None:
        cards.append(_card("Tokens a second", number(rate), "mean over the run"))
    peak = _known(run, "peak_memory_gib", max(memory, default=None))
    if peak is not None:
        cards.append(_card("Peak memory", f"{number(peak)} GiB", ""))
    return f'<section class="cards">{"".join(cards)}</section>'


def _known(run: RunFiles, key: str, otherwise: Any) -> Any:
    """What the summary says, or ``otherwise`` where it says nothing."""
    value = run.summary.get(key)
    return otherwise if value is None else value


def _values(run: RunFiles, name: str) -> list[float]:
    return [value for _, value in run.series(name)]


def _outcome_card(run: RunFiles) -> str:
    """Accuracy or reward before and after on held-out prompts; the training reward where neither was measured."""
    for measure, name in MEASURES.items():
        held_out = _values(run, f"eval/{measure}")
        before = _known(run, f"{measure}_before", held_out[0] if held_out else None)
        after = _known(run, f"{measure}_after", held_out[-1] if held_out else None)
        if before is not None and after is not None:
            first, last, change = compared(measure, before, after)
            better = after <= before if measure in LESS_IS_BETTER else after >= before
            what = "rows" if _values(run, "rows/tokens_mean") else "prompts"
            stderr = _values(run, stderr_of(f"eval/{measure}"))
            about = f", {precision(measure, stderr[-1])}" if stderr else ""
            note = f'<span class="{"up" if better else "down"}">{change}</span> on held-out {what}{about}'
            return _card(f"{name.capitalize()}, before → after", f"{first} → {last}", note, main=True)
    reward = _values(run, "reward/mean")
    if not reward:
        return ""
    return _card("Reward, first → last step", f"{number(reward[0])} → {number(reward[-1])}", "", main=True)


def _card(label: str, value: str, note: str, main: bool = False) -> str:
    kind = "card main" if main else "card"
    return f'<div class="{kind}"><span class="soft">{label}</span><b>{value}</b><span class="soft">{note}</span></div>'


def _charts(run: RunFiles) -> str:
    names = run.names()
    charts = [chart for curve in CURVES if (chart := _chart(run, curve))]
    phases = _phase_chart(run, phases_in(names))
    # The time chart goes after the curves of learning and before those of speed.
    split = next((i for i, chart in enumerate(charts) if "<h3>Tokens a second</h3>" in chart), len(charts))
    charts[split:split] = [phases] if phases else []
    if not charts:
        return '<p class="soft" style="margin-top:24px">No metrics were recorded.</p>'
    section = f'<h2>Curves</h2><div class="charts">{"".join(charts)}</div>'
    others = [_chart(run, Curve(name, "", {"value": name})) for name in other_metrics(names)]
    if any(others):
        count = f"{len(others)} more metric{'s' if len(others) > 1 else ''}"
        section += (
            f'<details class="box"><summary>{count}</summary><div class="charts">{"".join(others)}</div></details>'
        )
    return section


def _chart(run: RunFiles, curve: Curve) -> str:
    series = curve_series(run, curve)
    if not series:
        return ""
    latest = [(s.style, s.name if len(series) > 1 else "", curve.show(s.points[-1][1])) for s in series]
    legend = "".join(
        f'<span><i class="{style}"></i>{escape(f"{name} {value}")}</span>' for style, name, value in latest
    )
    drawing = line_chart(series, curve.show, from_zero=curve.from_zero, low=curve.low)
    return _figure(curve.title, curve.note, legend, drawing)


def _phase_chart(run: RunFiles, phases: list[str]) -> str:
    if not phases:
        return ""
    series = phase_series(run, phases)
    legend = "".join(f'<span><i class="{area.style}"></i>{escape(area.name)}</span>' for area in series)
    return _figure(PHASE_TITLE, PHASE_NOTE, legend, stacked_chart(series, duration))


def _figure(title: str, note: str, legend: str, drawing: str) -> str:
    return (
        f'<figure><div class="head"><h3>{escape(title)}</h3><div class="legend">{legend}</div></div>'
        f'<p class="soft">{escape(note)}</p>{drawing}</figure>'
    )


def _setup(run: RunFiles) -> str:
    """The resolved configuration and the versions: what it takes to do the run again."""
    parts = []
    versions = run.summary.get("versions")
    if isinstance(versions, dict) and versions:
        items = "".join(f"<span>{escape(str(k))} <b>{escape(str(v))}</b></span>" for k, v in versions.items())
        parts.append(f'<div class="versions soft">{items}</div>')
    if run.config_text:
        text = f"<pre>{escape(run.config_text)}</pre>"
        parts.append(f'<details class="box"><summary>Resolved configuration</summary>{text}</details>')
    return f"<h2>Set-up</h2>{''.join(parts)}" if parts else ""
