"""The last lines of a run: what was learned, where things are, how to go on."""

from pathlib import Path
from typing import Any

from engine.report import records
from engine.report.format import duration, number, percent


def closing_lines(summary: dict[str, Any], run_dir: Path, how_to_go_on: list[str]) -> str:
    """The text to print when a run has finished; plain ASCII, so that no terminal can stumble over it."""
    lines = ["", _outcome(summary), _cost(summary), ""]
    places = [
        ("report", run_dir / records.REPORT),
        ("metrics", run_dir / records.METRICS),
        ("samples", run_dir / records.SAMPLES),
        ("curves", run_dir / records.TENSORBOARD),
        ("checkpoints", run_dir / "checkpoints"),
    ]
    there = [(name, path) for name, path in places if path.exists()]
    lines += [f"  {name:<12} {_command(name)}{path}" for name, path in there]
    if how_to_go_on:
        lines += ["", "To go on:", *(f"  {line}" for line in how_to_go_on)]
    return "\n".join(lines)


def points(before: float, after: float) -> str:
    """The change between two shares, in percentage points: +72.5 points."""
    return f"{100 * (after - before):+.1f} points"


def _outcome(summary: dict[str, Any]) -> str:
    before, after = summary.get("accuracy_before"), summary.get("accuracy_after")
    algo = str(summary.get("algo", "run")).upper() if "algo" in summary else "The run"
    if before is not None and after is not None:
        return f"{algo}: accuracy {percent(before)} -> {percent(after)} ({points(before, after)})"
    if after is not None:
        return f"{algo}: accuracy {percent(after)} at the end; it was not measured before training"
    return f"{algo}: finished; no accuracy was measured"


def _cost(summary: dict[str, Any]) -> str:
    pieces = []
    if summary.get("steps") is not None:
        pieces.append(f"{summary['steps']} steps")
    if summary.get("episodes") is not None:
        pieces.append(f"{summary['episodes']} episodes")
    if summary.get("seconds") is not None:
        pieces.append(duration(summary["seconds"]))
    if summary.get("tokens_per_second") is not None:
        pieces.append(f"{number(summary['tokens_per_second'])} tokens/s")
    if summary.get("peak_memory_gib") is not None:
        pieces.append(f"peak memory {number(summary['peak_memory_gib'])} GiB")
    return ", ".join(pieces)


def _command(name: str) -> str:
    return "tensorboard --logdir " if name == "curves" else ""
