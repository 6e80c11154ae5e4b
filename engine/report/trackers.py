"""Copies of a run's metrics for experiment trackers, through their own packages: Weights & Biases and trackio.

A tracker that fails says so once and gets nothing more: metrics.jsonl has everything.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.report import records

SECONDS = 60.0
"""How long Weights & Biases may take to begin a run, and to send what is left at its end."""


class Tracker(ABC):
    """One tracker's run."""

    title: str
    """What it is called for people."""
    where: str
    """Where the run is to be seen."""

    @abstractmethod
    def __init__(self, run_dir: Path, project: str, settings: dict[str, Any], before: str | None) -> None:
        """Begins a run, or goes on with the one that ``before`` identifies."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """What finds this run again."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics of a step, or of an evaluation after it."""

    @abstractmethod
    def close(self, ok: bool) -> None:
        """Ends the run."""


class WandbTracker(Tracker):
    """Weights & Biases, with its files in the run's folder; ``WANDB_MODE=offline`` keeps them there."""

    title = "Weights & Biases"

    def __init__(self, run_dir: Path, project: str, settings: dict[str, Any], before: str | None) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")  # it would print, and ask for a key, into the live display
        import wandb

        self._run = wandb.init(
            project=project,
            name=run_dir.name,
            id=before or secrets.token_hex(4),
            resume="allow",
            dir=run_dir,
            config=settings,
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, init_timeout=SECONDS, finish_timeout=SECONDS
            ),
        )
        # A resumed run makes some steps again: its own axis takes them, where wandb's count would drop them.
        self._run.define_metric("*", step_metric="step")
        self.where = self._run.url or f"offline; send it by: wandb sync {run_dir}/wandb/offline-run-*"

    @property
    def identity(self) -> str:
        return str(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self, ok: bool) -> None:
        self._run.finish(exit_code=0 if ok else 1)


class TrackioTracker(Tracker):
    """trackio, whose files are in ``TRACKIO_DIR``, by default in the Hugging Face cache."""

    title = "trackio"

    def __init__(self, run_dir: Path, project: str, settings: dict[str, Any], before: str | None) -> None:
        import trackio

        with contextlib.redirect_stdout(io.StringIO()):
            self._run = trackio.init(
                project=project,
                name=before or run_dir.name,
                resume="allow" if before else "never",
                config=settings,
                embed=False,
            )
        self.where = f"trackio show --project {project}"

    @property
    def identity(self) -> str:
        return str(self._run.name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, ok: bool) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()


KINDS: dict[str, type[Tracker]] = {"wandb": WandbTracker, "trackio": TrackioTracker}
"""By the name of the package."""


class Trackers:
    """Those that a run has; what identifies each one's run is in the run's folder, so that a resumed run goes on."""

    def __init__(
        self,
        run_dir: Path,
        projects: Mapping[str, str],
        settings: dict[str, Any],
        new: bool,
        say: Callable[[str], None],
    ) -> None:
        """Opens them.

        Args:
            projects: the project by the name of the package.
            settings: the run's, nested.
            new: whether the run starts from the beginning.
            say: takes a line for the person.
        """
        self._say, self._open = say, dict[str, Tracker]()
        path = run_dir / records.TRACKERS
        before: dict[str, str] = {}
        if not new and path.is_file():
            with contextlib.suppress(OSError, ValueError):
                before = json.loads(path.read_text(encoding="utf-8"))
        for name, project in projects.items():
            kind = KINDS[name]
            try:
                self._open[name] = tracker = kind(run_dir, project, settings, before.get(name))
            except Exception as problem:  # whatever a package, a server or a network makes of it
                say(f"Nothing goes to {kind.title}: {_words(problem)}")
                continue
            before[name] = tracker.identity
            say(f"{kind.title}: {tracker.where}")
        if self._open:
            records.write_atomically(path, records.json_text(before))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends metrics to all."""
        for name, tracker in list(self._open.items()):
            try:
                tracker.log(step, metrics)
            except Exception as problem:
                del self._open[name]
                self._say(f"Nothing more goes to {tracker.title}: {_words(problem)}")

    def close(self, ok: bool) -> None:
        """Ends their runs."""
        for tracker in self._open.values():
            try:
                tracker.close(ok)
            except Exception as problem:
                self._say(f"{tracker.title} may lack the last steps: {_words(problem)}")
        self._open.clear()


def _words(problem: Exception) -> str:
    return " ".join(str(problem).split())[:300] or type(problem).__name__
