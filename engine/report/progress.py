"""What the displays show, and the arithmetic behind it (time left, current phase); no drawing here."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.report.metrics import phases_in

_WINDOW = 20  # steps that the estimate of the time left looks back on: long enough to be calm, short enough to follow


@dataclass
class Progress:
    """The state of a run as its user sees it. ``clock`` gives seconds and is replaced in tests.

    The live display draws from another thread. It is safe without a lock because every update is one assignment or one
    append, and the drawing copies what it iterates over.
    """

    total_steps: int
    header: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    clock: Callable[[], float] = time.monotonic
    metrics: dict[str, float] = field(default_factory=dict)
    evaluation: tuple[int, dict[str, float]] | None = None
    history: dict[str, list[float]] = field(default_factory=dict)
    not_finite: int = 0
    phase: str | None = None
    phase_since: float = 0.0
    ended: str | None = None

    def __post_init__(self) -> None:
        self.started = self.clock()
        self._ends: deque[float] = deque([self.started], maxlen=_WINDOW + 1)

    def enter(self, phase: str | None) -> None:
        """Mark the phase in progress."""
        self.phase_since = self.clock()
        self.phase = phase

    def finish_step(self, step: int, metrics: dict[str, float]) -> None:
        """Take in the finite metrics of a finished step."""
        if self.step and len(self._ends) == 2:
            # The first step of a process also loads, compiles and warms up: once another is known, it tells nothing.
            self._ends.popleft()
        self._ends.append(self.clock())
        self.remember(metrics)
        self.metrics = metrics
        self.step = step

    def remember(self, metrics: dict[str, float]) -> None:
        """Add values to the history that the sparklines are drawn from."""
        for name, value in metrics.items():
            self.history.setdefault(name, []).append(value)

    def elapsed(self) -> float:
        """Seconds since this process began."""
        return self.clock() - self.started

    def seconds_left(self) -> float | None:
        """Time to the last step at the pace of the recent ones, evaluations and checkpoints included."""
        done = len(self._ends) - 1
        if done < 1 or self.ended:
            return None
        return (self._ends[-1] - self._ends[0]) / done * max(self.total_steps - self.step, 0)

    def phase_seconds(self) -> list[tuple[str, float]]:
        """The phases of the last finished step with their seconds, in order."""
        metrics = self.metrics
        return [(phase, metrics[f"time/{phase}"]) for phase in phases_in(list(metrics))]


def describe(header: dict[str, Any]) -> list[str]:
    """The header as short pieces: what a reader recognises by itself bare, the rest as ``name value``."""
    pieces = []
    for key, value in header.items():
        if value is None:
            continue
        if key == "world_size":
            pieces.append(f"{value} rank" if value == 1 else f"{value} ranks")
        elif key == "algo":
            pieces.append(str(value).upper())
        elif key in ("model", "data", "backend"):
            pieces.append(str(value))
        else:
            pieces.append(f"{key.replace('_', ' ')} {value}")
    return pieces
