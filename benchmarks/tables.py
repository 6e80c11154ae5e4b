"""Records as text: aligned for a terminal, or Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from benchmarks.records import Record
from benchmarks.targets import Verdict, verdicts

HEAD = ["case", "T", "H", "V", "inputs", "implementation", "ms", "10–90 %", "× bare", "× eager", "TFLOP/s"]
HEAD += ["extra GiB", "logprob err", "grad err", "note"]
TEXT_COLUMNS = {"case", "inputs", "implementation", "note"}
Table = list[list[str]]
Layout = Callable[[Sequence[str], Table], str]


def number(value: float | None, digits: str) -> str:
    """Formatted, or empty."""
    return "" if value is None else format(value, digits)


def measurements(records: Iterable[Record]) -> Table:
    """A line for each record that says something: not for implementations that have nothing to do with the case."""
    return [_line(record) for record in records if record.status != "same as bare"]


def _line(record: Record) -> list[str]:
    spread = f"{record.ms_p10:.2f}–{record.ms_p90:.2f}" if record.ms_p10 is not None else ""
    note = record.status if record.status != "ok" else f"{record.rounds} rounds" if record.rounds < 7 else ""
    return [
        record.case if record.dtype == "bfloat16" else f"{record.case} {record.dtype}",
        str(record.T),
        str(record.H or ""),
        str(record.V or ""),
        record.inputs if record.V else "",
        record.impl,
        number(record.ms, ".2f"),
        spread,
        number(record.ratio_to_bare, ".3f"),
        number(record.ratio_to_eager, ".3f"),
        number(record.tflops, ".1f" if record.card.startswith("NVIDIA") else ".3f"),
        number(record.extra_gib, ".3f"),
        number(record.logprob_err, ".1e"),
        number(record.grad_err, ".1e"),
        note,
    ]


VERDICT_HEAD = ["case", "H", "V", "inputs", "what", "measured", "target", "met"]
VERDICT_TEXT = {"case", "inputs", "what", "met"}


def judgements(records: Iterable[Record]) -> Table:
    """A line for each target."""
    return [_judgement(verdict) for verdict in verdicts(records)]


def _judgement(verdict: Verdict) -> list[str]:
    record, digits = verdict.record, ".1e" if "logprob" in verdict.metric else ".3f"
    return [
        f"{record.case} {record.dtype}",
        str(record.H),
        str(record.V),
        record.inputs,
        verdict.metric,
        number(verdict.value, digits) or record.status,
        ("≥ " if verdict.at_least else "≤ ") + format(verdict.limit, digits),
        "yes" if verdict.met else "NO",
    ]


def plain(head: Sequence[str], lines: Table) -> str:
    """Aligned columns, numbers to the right."""
    left = TEXT_COLUMNS | VERDICT_TEXT
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]

    def join(line: Sequence[str]) -> str:
        cells = zip(line, widths, head, strict=True)
        return "  ".join(
            cell.ljust(width) if name in left else cell.rjust(width) for cell, width, name in cells
        ).rstrip()

    return "\n".join([join(head), "  ".join("-" * width for width in widths), *map(join, lines)])


def markdown(head: Sequence[str], lines: Table) -> str:
    """The same for a document."""
    left = TEXT_COLUMNS | VERDICT_TEXT
    rule = ["---" if name in left else "--:" for name in head]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))


def report(records: Sequence[Record], layout: Layout) -> str:
    """Both tables, the targets last."""
    parts = [layout(HEAD, measurements(records))]
    if targets := judgements(records):
        parts.append(layout(VERDICT_HEAD, targets))
    return "\n\n".join(parts)


def legend(records: Sequence[Record]) -> str:
    """Cards, versions and commands, each once."""
    packages = {f"{record.impl} {record.version}" for record in records if record.version}
    lines = sorted({f"{record.card}; torch {record.torch}, triton {record.triton}" for record in records})
    lines += [", ".join(sorted(packages))] if packages else []
    return "\n".join([*lines, *sorted({record.command for record in records})])
