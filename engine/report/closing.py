"""The last lines of a run: what was learned, where things are, how to go on."""

from pathlib import Path
from typing import Any

from engine.report import records
from engine.report.format import duration, number, percent

MEASURES = {"accuracy": "accuracy", "reward": "mean reward", "loss": "held-out loss"}
"""What a run is judged by on held-out prompts: its key in summary.json and in ``eval/…``, and what people call it.

A run has one of them: accuracy where every score is 0 or 1, the loss where it trains on rows.
"""
LESS_IS_BETTER = ("loss",)


def what_next(run_dir: Path, model_dir: Path, steps: int, trained: str) -> list[str]:
    """Commands for a run of so many steps that has finished, and the line that loads the ``policy`` or
    ``reward_model`` that it trained."""
    kind = "AutoModelForSequenceClassification" if trained == "reward_model" else "AutoModelForCausalLM"
    return [
        f"python -m engine.run --resume {run_dir} --train.steps {2 * steps}   # train longer",
        f"tensorboard --logdir {run_dir.parent}",
        f"{kind}.from_pretrained('{model_dir}')   # the trained {trained.replace('_', ' ')}",
    ]


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
    existing = [(name, path) for name, path in places if path.exists()]
    lines += [f"  {name:<12} {_command(name)}{path}" for name, path in existing]
    if how_to_go_on:
        lines += ["", "To go on:", *(f"  {line}" for line in how_to_go_on)]
    return "\n".join(lines)


def compared(measure: str, before: float, after: float) -> tuple[str, str, str]:
    """Both values and the change: 12.5%, 75.0%, +62.5 points of accuracy; 0.12, 0.56, +0.44 of reward."""
    if measure == "accuracy":
        return percent(before), percent(after), f"{100 * (after - before):+.1f} points"
    size = max(abs(before), abs(after))
    if size == 0 or 0.1 <= size < 1000:
        # As many decimals for each.
        return f"{before:z.2f}", f"{after:z.2f}", f"{after - before:+z.2f}"
    return number(before), number(after), ("+" if after >= before else "-") + number(abs(after - before))


def precision(measure: str, stderr: float) -> str:
    """The standard error of the last held-out number, in the unit of ``compared``'s change."""
    value = f"{100 * stderr:.1f} points" if measure == "accuracy" else number(stderr)
    return f"standard error at the end {value}"


def _outcome(summary: dict[str, Any]) -> str:
    algo = str(summary.get("algo", "run")).upper() if "algo" in summary else "The run"
    for measure, name in MEASURES.items():
        before, after = summary.get(f"{measure}_before"), summary.get(f"{measure}_after")
        if before is not None and after is not None:
            first, last, change = compared(measure, before, after)
            stderr = summary.get(f"{measure}_after_stderr")
            about = "" if stderr is None else f", {precision(measure, stderr)}"
            return f"{algo}: {name} {first} -> {last} ({change}{about})"
        if after is not None:
            _, last, _ = compared(measure, after, after)
            return f"{algo}: {name} {last} at the end; it was not measured before training"
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
