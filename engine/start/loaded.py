"""Loads and looks at what a run is made of, while a fault in it still leaves no folder."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from engine import rewards
from engine.config import Config, ConfigError
from engine.machine.world import World
from engine.memory import planning
from engine.memory.arrangements import Side
from engine.report.output import Output
from engine.run_folder import checkpoints
from engine.start import build, prepared
from engine.start.preflight import Inputs
from engine.training import export


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a training rank has before the run has a folder: plans, models, sources of scores."""

    plans: dict[Side, planning.MemoryPlan]
    scorer: rewards.Scorer | None
    """None where nothing is sampled."""
    path: str
    """The policy's folder or hub name."""
    models: build.Models

    @classmethod
    def of(cls, config: Config, inputs: Inputs, world: World) -> Loaded:
        """Plans memory, loads the models and looks at what they compute. Collective.

        Raises:
            ConfigError: something does not fit, or computes something else than it should.
        """
        output = Output(sys.stdout) if world.main else None

        def say(text: str) -> None:
            if output:
                output.line(text)

        plans = build.memory_plans(config, world)
        path = prepared.policy(config, world, say)
        padding, checkpointing = inputs.tokenizer.pad_token_id, plans["train"].checkpointing
        models = build.load_models(config, path, world, checkpointing=checkpointing, say=say, padding=padding)
        if config.resume:
            _check_base(Path(config.resume), models.digests)
        export.trial(models.policy.model, inputs.tokenizer, path, f"model.path '{path}'")
        scorer = None if config.trains_on_rows else rewards.load(config, world, inputs.sources)
        return cls(plans, scorer, path, models)


def _check_base(run_dir: Path, digests: dict[str, str]) -> None:
    """Raises ConfigError where a run's checkpoint was trained from other weights than those that were loaded now."""
    checkpoint = checkpoints.newest(run_dir)
    before = checkpoints.read(checkpoint).base_models if checkpoint else {}
    for key, found in digests.items():
        if before.get(key, found) != found:
            raise ConfigError(
                f"resume: {key} holds other weights, or another configuration, than when {run_dir} began: put the "
                "first ones back, or start anew"
            )
