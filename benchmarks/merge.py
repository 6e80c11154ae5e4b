"""Joins results: python -m benchmarks.merge A.json B.json … -o benchmarks/results/kernels-h100.json

Writes the joined JSON, and beside it the tables in Markdown and the picture. Where two files have the same measurement,
the later file's is taken.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.plot import draw
from benchmarks.records import Record, load, merge, save
from benchmarks.tables import legend, markdown, plain, report


def write(records: list[Record], path: Path) -> list[Path]:
    """JSON, Markdown and, with matplotlib, PNG; returns what was written."""
    save(records, path)
    text = path.with_suffix(".md")
    text.write_text(f"{report(records, markdown)}\n\n```\n{legend(records)}\n```\n")
    picture = path.with_suffix(".png")
    return [path, text, picture] if draw(records, picture) else [path, text]


def main(arguments: list[str] | None = None) -> None:
    """Joins, writes and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.merge", description=__doc__)
    parser.add_argument("parts", type=Path, nargs="+", metavar="FILE.json")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.json")
    options = parser.parse_args(arguments)
    records = merge(load(part) for part in options.parts)
    written = write(records, options.output)
    print(report(records, plain), "\n")
    print("wrote", *written)


if __name__ == "__main__":
    main()
