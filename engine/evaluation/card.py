"""The model card of an export: what it was trained from and by which settings, and its held-out curve."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml

from engine.config import Config, cli
from engine.evaluation.places import Place
from engine.report import records
from engine.report.format import number
from engine.run_folder.summary import versions

MOST_ROWS = 50
"""Rows of the held-out curve; of a longer one so many are shown, evenly spaced, its last one among them."""


def text(place: Place, config: Config, base: str, form: str) -> str:
    """README.md of the folder, with the front matter that the Hugging Face hub reads.

    Args:
        base: folder or hub name of the model that training began with.
        form: ``merged`` or ``adapter``.
    """
    assert place.run_dir is not None
    scores = config.trained == "reward_model"
    front = {
        "library_name": "peft" if form == "adapter" else "transformers",
        "pipeline_tag": "text-classification" if scores else "text-generation",
        "base_model": base,
        "tags": ["tandem", config.algorithm.name],
    }
    data = config.data.label
    kind = "reward model" if scores else "policy"
    what = f"The adapter of a {kind}" if form == "adapter" else f"A {kind}"
    lines = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {place.run_dir.resolve().name}, step {place.step}",
        f"{what} that Tandem trained by {config.algorithm.name} from `{base}` on `{data}`, for {place.step} of "
        f"{config.train.steps} steps of {config.episodes_per_step} responses.",
        *_curve(place.run_dir, place.step),
        "## Settings",
        "Those that are not the defaults:",
        f"```yaml\n{yaml.safe_dump(_chosen(config), sort_keys=False)}```",
        "## Versions",
        "\n".join(f"- {name} {version}" for name, version in {"commit": commit(), **versions()}.items() if version),
    ]
    return "\n\n".join(lines) + "\n"


def _curve(run_dir: Path, step: int | None) -> list[str]:
    """The held-out measurements up to a step as a table, or nothing where there are none."""
    rows = [
        row
        for row in records.read_lines(run_dir / records.METRICS)
        if any(name.startswith("eval/") for name in row) and (step is None or row["step"] <= step)
    ]
    names = list(dict.fromkeys(name for row in rows for name in row if name.startswith("eval/")))
    if not rows:
        return []
    spaced = {round(i * (len(rows) - 1) / max(1, MOST_ROWS - 1)) for i in range(MOST_ROWS)}
    table = [["step", *(name.removeprefix("eval/") for name in names)], ["---:"] * (1 + len(names))]
    table += [
        [str(row["step"]), *(_shown(row.get(name)) for name in names)] for i, row in enumerate(rows) if i in spaced
    ]
    return ["## Held-out prompts", "\n".join(f"| {' | '.join(cells)} |" for cells in table)]


def _shown(value: Any) -> str:
    return number(value) if isinstance(value, (int, float)) else ""


def _chosen(config: Config) -> dict[str, Any]:
    """The settings that differ from their defaults, by dotted key; none of the run's place or environment."""
    defaults = dict(cli.flat(type(config)()))
    left_out = ("name", "output_dir", "resume", "live", "env")
    found = config.model_dump(mode="json")
    chosen = {}
    for key, value in cli.flat(config):
        if value != defaults[key] and key not in left_out:
            item: Any = found
            for part in key.split("."):
                item = item[part]
            chosen[key] = item
    return chosen


def commit() -> str | None:
    """The commit of the checkout that this is, with a mark if files differ from it; None outside of one."""
    here = Path(__file__).resolve().parents[2]
    try:
        said = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return said.stdout.strip() if said.returncode == 0 and (here / ".git").exists() else None
