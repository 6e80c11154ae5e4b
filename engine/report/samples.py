"""The sample tables of report.html: what the policy wrote at the first step and at the last."""

from html import escape
from typing import Any

from engine.report.format import number

_ROWS = 4
_KNOWN = ("step", "prompt", "response", "reward", "finish_reason", "advantage")

Row = dict[str, Any]


def sample_section(first: list[Row], last: list[Row]) -> str:
    """Two tables side by side (below each other on a phone), one where the run has samples of one step only."""
    tables = [_table(rows) for rows in (first, last) if rows]
    if not tables:
        return ""
    return f'<h2>Samples</h2><div class="sides">{"".join(tables)}</div>'


def _table(rows: list[Row]) -> str:
    body = "".join(
        f'<tr><td data-label="Prompt">{_text(row.get("prompt"))}</td>'
        f'<td data-label="Response">{_text(row.get("response"))}</td>'
        f'<td data-label="Reward">{_reward(row)}</td></tr>'
        for row in rows[:_ROWS]
    )
    return (
        f"<div><h3>Step {rows[0]['step']}</h3><table><thead><tr><th>Prompt</th><th>Response</th><th>Reward</th></tr>"
        f"</thead><tbody>{body}</tbody></table></div>"
    )


def _text(value: Any) -> str:
    """Model output is untrusted: escaped, and control characters (which HTML forbids) made visible."""
    text = "" if value is None else str(value)
    visible = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return f"<pre>{escape(visible)}</pre>"


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
