"""``python -m engine.run --algo ppo``: checks the configuration, starts the ranks, trains."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
import warnings
from pathlib import Path

from engine import cli, launch, state
from engine.config import Config, ConfigError

NOISE = (r".*`torch\.distributed\.\w+` is deprecated",)
"""Warnings of libraries about their own insides, which nobody who runs this can act on."""


def main(argv: list[str] | None = None) -> int:
    """Runs a command line.

    Returns:
        0 when the run finished, 2 for a configuration that cannot work, 130 when interrupted; a failure while running
        raises.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        config, options = cli.parse(argv)
        world_size = launch.world_size(config)
        config.check(world_size)
        _check_run_folder(config, world_size)
        _check_packages(config)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.print_config:
        print(cli.dump_yaml(config), end="")
        return 0
    os.environ.setdefault("DS_ACCELERATOR", launch.device_type(config))  # DeepSpeed reads it when imported
    for message in NOISE:
        warnings.filterwarnings("ignore", message)
    try:
        if world_size > 1 and not launch.is_rank():
            return launch.start_ranks(world_size, argv)
        from engine.loop import train  # imports torch

        train(config, options.config)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _check_run_folder(config: Config, world_size: int) -> None:
    """A new run needs a new folder; a resumed one a checkpoint, the same number of ranks, and steps left to make."""
    if config.resume is None:
        if config.name is not None and (folder := Path(config.output_dir) / config.name).exists():
            raise ConfigError(f"name: {folder} exists; go on with --resume {folder}, or give another --name")
        return
    checkpoint = state.newest(Path(config.resume))
    if checkpoint is None:
        raise ConfigError(
            f"resume: {config.resume} has no checkpoint (it writes one every save.every_steps); start anew"
        )
    saved = state.read(checkpoint)
    if saved.world_size != world_size:
        raise ConfigError(
            f"resume: {checkpoint} was written by {saved.world_size} rank(s), not {world_size}: set launch.ranks"
        )
    if saved.step >= config.train.steps:
        raise ConfigError(
            f"resume: {checkpoint} has all of train.steps ({config.train.steps}); give more, --train.steps N"
        )


def _check_packages(config: Config) -> None:
    """What this run needs and the package imports without."""
    needed = {"deepspeed": "training"} | (
        {"vllm": "generation.backend vllm"} if config.generation.backend == "vllm" else {}
    )
    for package, purpose in needed.items():
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"the package {package} is missing, {purpose} needs it: run make setup, or pip install .[gpu]"
            )
    try:
        importlib.metadata.distribution("kernels")
    except importlib.metadata.PackageNotFoundError:
        return
    raise ConfigError("the PyPI package 'kernels' collides with Tandem's own 'kernels': run pip uninstall kernels")


if __name__ == "__main__":
    sys.exit(main())
