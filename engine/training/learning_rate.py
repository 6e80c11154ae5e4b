"""Learning rates: their schedule, and what becomes of it where a run is resumed with other settings.

The schedule counts planned optimizer steps, also those that are not made.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

from deepspeed.runtime.engine import DeepSpeedEngine

from engine.config import Config


def schedule_factor(schedule: str, warmup_steps: int, total_steps: int) -> Callable[[int], float]:
    """The factor on the peak learning rate at each optimizer step, counted from 0."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        return {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}[schedule]

    return factor


def advance(engine: DeepSpeedEngine) -> None:
    """Advances the schedule by a planned optimizer step that is not made."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # before the first optimizer step
        engine.lr_scheduler.step()


class Rates(NamedTuple):
    """An engine's learning rate for its next optimizer step."""

    planned: float
    """By the settings that the checkpoint was written with."""
    next: float
    """By this run's."""


def apply_settings(engine: DeepSpeedEngine, config: Config, learning_rate: float) -> Rates:
    """Gives an engine that was loaded from a checkpoint the learning rate and AdamW settings of this configuration."""
    scheduler, train = engine.lr_scheduler, config.train
    planned = float(scheduler.get_last_lr()[0])
    scheduler.base_lrs = [learning_rate] * len(scheduler.base_lrs)
    rate = learning_rate * scheduler.lr_lambdas[0](scheduler.last_epoch)
    scheduler._last_lr = [rate] * len(scheduler.base_lrs)
    for group in engine.optimizer.param_groups:
        group.update(
            lr=rate,
            initial_lr=learning_rate,
            betas=train.adam_betas,
            eps=train.adam_eps,
            weight_decay=train.weight_decay,
        )
    return Rates(planned, rate)


def jump(rates: dict[str, Rates], last: dict[str, float]) -> str | None:
    """One line for the models whose next learning rate is not the one that the checkpoint's settings would give.

    Args:
        rates: by model.
        last: of the last planned optimizer step before the checkpoint, by model; a model may have had none.
    """
    changed = [
        f"{name} {last[name]:.4g} before, {rate.next:.4g} next ({rate.planned:.4g} by the checkpoint's settings)"
        if name in last
        else f"{name} {rate.next:.4g} first ({rate.planned:.4g} by the checkpoint's settings)"
        for name, rate in rates.items()
        if not math.isclose(rate.planned, rate.next, rel_tol=1e-6)
    ]
    return f"Learning rate changed by resuming with other settings: {'; '.join(changed)}" if changed else None
