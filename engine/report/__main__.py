"""``python -m engine.report runs/x``: rebuild report.html and the PNGs from a run folder's files."""

import argparse
import sys
from pathlib import Path

from engine.report.html import write_report


def main(arguments: list[str] | None = None) -> int:
    """Rebuild the report of every folder named; the exit status is 1 when a folder does not exist."""
    parser = argparse.ArgumentParser(prog="python -m engine.report", description=__doc__.partition(": ")[2])
    parser.add_argument("run_dir", nargs="+", type=Path, help="a run's folder, such as runs/quickstart")
    status = 0
    for run_dir in parser.parse_args(arguments).run_dir:
        if run_dir.is_dir():
            print(write_report(run_dir))
        else:
            print(f"{run_dir}: no such folder", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
