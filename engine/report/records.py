"""The files of a run folder: written so that a crash at any moment loses at most the line being written."""

import contextlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import yaml

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
NOTES = "notes.jsonl"
SUMMARY = "summary.json"
CONFIG = "config.yaml"
CRASH = "crash.txt"
REPORT = "report.html"
TENSORBOARD = "tensorboard"
TRACKERS = "trackers.json"


def finite(value: Any) -> Any:
    """``value`` with every NaN and infinity, at any depth, replaced by None: JSON has no word for them."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_line(record: dict[str, Any]) -> str:
    """One line of JSON; numbers of other libraries (numpy's, a tensor's) become floats."""
    return json.dumps(finite(record), ensure_ascii=False, allow_nan=False, default=lambda item: finite(float(item)))


def json_text(record: dict[str, Any]) -> str:
    """The same for a file of its own: indented, one key a line."""
    return json.dumps(json.loads(json_line(record)), ensure_ascii=False, indent=2) + "\n"


def append_to(path: Path) -> TextIO:
    """Open a .jsonl file for adding lines.

    A lone surrogate (half a character, which byte-level tokenizers can make) has no UTF-8 form; escaped it is JSON.
    """
    return path.open("a", encoding="utf-8", errors="backslashreplace")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a .jsonl file in order; a missing file has none, and torn lines are left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line, parse_constant=lambda _: None)
            except ValueError:
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield record


def write_atomically(path: Path, text: str) -> None:
    """Replace ``path`` in one move: a reader, or a crash, sees the old text or the new text and never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # on a full disk it takes what the report needs
            temporary.unlink()
        raise


def rewind(path: Path, step: int) -> None:
    """Forget the records after ``step``; a resumed run is about to write them again."""
    if path.exists():
        write_atomically(path, "".join(json_line(r) + "\n" for r in read_lines(path) if r["step"] <= step))


def set_aside(path: Path) -> None:
    """Keep the records of an earlier run in the same folder, under the name ``previous-…``."""
    if path.exists():
        os.replace(path, path.with_name(f"previous-{path.name}"))


@dataclass(frozen=True)
class RunFiles:
    """Everything the report knows: what could be read of a run folder, each part empty where its file is missing."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    first_samples: list[dict[str, Any]] = field(default_factory=list)
    last_samples: list[dict[str, Any]] = field(default_factory=list)
    first_held_out: list[dict[str, Any]] = field(default_factory=list)
    """Responses of the first evaluation."""
    last_held_out: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    crash: str = ""
    notes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def algo(self) -> str:
        """The algorithm's name in capitals, or nothing where no file tells."""
        return str(self.summary.get("algo") or self.config.get("algo") or "").upper()

    @property
    def data(self) -> str:
        """The embedded task, the data set or those of a mixture, or nothing where no file tells."""
        mixture = self.setting("data", "mixture") or []
        paths = " + ".join(str(one.get("path")) for one in mixture if isinstance(one, dict))
        return str(self.setting("data", "task") or self.setting("data", "path") or paths)

    def setting(self, section: str, key: str) -> Any:
        """One value of the resolved configuration, or None."""
        part = self.config.get(section)
        return part.get(key) if isinstance(part, dict) else None

    def series(self, name: str) -> list[tuple[int, float]]:
        """The (step, value) points of one metric, without the steps where it was missing or not finite."""
        return [(r["step"], float(r[name])) for r in self.metrics if isinstance(r.get(name), (int, float))]

    def names(self) -> list[str]:
        """Every metric that has a value somewhere, in order of first appearance."""
        seen: dict[str, None] = {}
        for record in self.metrics:
            seen.update((key, None) for key, value in record.items() if value is not None and key != "step")
        return list(seen)

    def not_finite(self) -> dict[str, list[int]]:
        """The steps at which each metric was NaN or infinite (null in the file)."""
        steps: dict[str, list[int]] = {}
        for record in self.metrics:
            for key, value in record.items():
                if value is None:
                    steps.setdefault(key, []).append(record["step"])
        return steps


def load_run(run_dir: Path) -> RunFiles:
    """Read a run folder, whatever state a crash left it in."""
    config_text = _text(run_dir / CONFIG)
    samples, held_out = _Ends(), _Ends()
    for row in read_lines(run_dir / SAMPLES):
        (held_out if row.get("held_out") else samples).add(row)
    return RunFiles(
        name=run_dir.resolve().name,
        config=_mapping(config_text, yaml.safe_load, yaml.YAMLError),
        config_text=config_text,
        metrics=_one_measure(sorted(read_lines(run_dir / METRICS), key=lambda record: record["step"])),
        first_samples=samples.first,
        last_samples=samples.last,
        first_held_out=held_out.first,
        last_held_out=held_out.last,
        summary=_mapping(_text(run_dir / SUMMARY), json.loads, ValueError),
        crash=_text(run_dir / CRASH),
        notes=[record for record in read_lines(run_dir / NOTES) if record.get("note")],
    )


def _one_measure(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Graded scores that happen to be all 0 or 1 look like an accuracy: in a run with others, they are a reward too."""
    if not any("eval/reward" in record for record in metrics):
        return metrics
    return [
        {
            name.replace("eval/accuracy", "eval/reward"): value
            for name, value in record.items()
            if name != "reward/accuracy"
        }
        for record in metrics
    ]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _mapping(text: str, parse: Any, problem: type[Exception]) -> dict[str, Any]:
    """``text`` parsed, or nothing where it is empty, torn or no mapping."""
    try:
        value = parse(text)
    except problem:
        return {}
    return value if isinstance(value, dict) else {}


@dataclass
class _Ends:
    """The rows of the first and of the last step that has any, holding two steps in memory and not the file."""

    first: list[dict[str, Any]] = field(default_factory=list)
    last: list[dict[str, Any]] = field(default_factory=list)

    def add(self, row: dict[str, Any]) -> None:
        """Takes the next row of the file."""
        if not self.first or row["step"] == self.first[0]["step"]:
            self.first.append(row)
        elif self.last and row["step"] == self.last[0]["step"]:
            self.last.append(row)
        else:
            self.last = [row]
