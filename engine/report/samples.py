"""The sample tables of report.html: what the policy wrote first and last, in training and held out."""

from html import escape
from typing import Any

from engine.report.format import number
from engine.report.records import RunFiles

_ROWS = 4
_KNOWN = (
    "step", "prompt", "response", "response_raw", "ending", "reward", "finish_reason", "advantage", "dropped",
    "held_out",
)  # fmt: skip
_SWITCH = '<label class="soft"><input type="checkbox" id="special"/> Show special tokens of responses</label>'
"""Of style alone: a page that runs no script shows the other form of each response."""

Row = dict[str, Any]


def sample_sections(run: RunFiles) -> str:
    """Tables of training samples and of held-out responses, two of each side by side (below each other on a phone).

    One of a kind where the run has samples of one step only; none where it has none.
    """
    kinds = (
        ("Samples", "Step", (run.first_samples, run.last_samples)),
        ("Held-out responses", "After step", (run.first_held_out, run.last_held_out)),
    )
    sections, switch = [], _SWITCH
    for title, when, steps in kinds:
        if tables := [_table(rows, when) for rows in steps if rows]:
            shown = [row for rows in steps for row in rows[:_ROWS]]
            has_special = any("ending" in row or "response_raw" in row for row in shown)
            sections.append(f'<h2>{title}</h2>{switch * has_special}<div class="sides">{"".join(tables)}</div>')
            switch = "" if has_special else switch
    return "".join(sections)


def _table(rows: list[Row], when: str) -> str:
    body = "".join(
        f'<tr><td data-label="Prompt">{_text(row.get("prompt"))}</td>'
        f'<td data-label="Response">{_response(row)}</td>'
        f'<td data-label="Reward">{_reward(row)}</td></tr>'
        for row in rows[:_ROWS]
    )
    return (
        f"<div><h3>{when} {rows[0]['step']}</h3><table><thead><tr><th>Prompt</th><th>Response</th><th>Reward</th></tr>"
        f"</thead><tbody>{body}</tbody></table></div>"
    )


def _response(row: Row) -> str:
    """The response, and where it has special tokens its form with them too, which the switch shows instead."""
    raw = row.get("response_raw", f"{row.get('response')}{row['ending']}" if "ending" in row else None)
    if raw is None:
        return _text(row.get("response"))
    return _text(row.get("response"), ' class="plain"') + _text(raw, ' class="special"')


def _text(value: Any, attributes: str = "") -> str:
    """Model output is untrusted: escaped, and control characters (which HTML forbids) made visible."""
    text = "" if value is None else str(value)
    visible = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return f"<pre{attributes}>{escape(visible)}</pre>"


def _reward(row: Row) -> str:
    """The reward, and below it its parts, the advantage, and whether the response was cut by the length limit.

    Names are shown with spaces for underscores: a narrow column can break between words only.
    """
    notes = [f"{str(name).replace('_', ' ')} {_show(value)}" for name, value in _parts(row)]
    if row.get("advantage") is not None:
        notes.append(f"advantage {_show(row['advantage'])}")
    if row.get("finish_reason") is not None:
        notes.append(
            {"length": "cut by length", "stop": "stopped"}.get(row["finish_reason"], str(row["finish_reason"]))
        )
    if row.get("dropped"):
        notes.append("dropped: nothing was learned from it")
    lines = "<br>".join(escape(note) for note in notes)
    return f'<b>{escape(_show(row.get("reward")))}</b><span class="soft">{lines}</span>'


def _parts(row: Row) -> list[tuple[str, Any]]:
    """Whatever else the row holds; a nested mapping's entries count as parts themselves."""
    parts: list[tuple[str, Any]] = []
    for name, value in row.items():
        if isinstance(value, dict):
            parts += value.items()
        elif name not in _KNOWN and isinstance(value, (int, float, str)):
            parts.append((name, value))
    return parts


def _show(value: Any) -> str:
    return number(value) if isinstance(value, float) else "not finite" if value is None else str(value)
