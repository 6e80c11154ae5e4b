"""``python -m engine.run --algo ppo``: checks the configuration, starts the ranks, trains."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from engine import cli, launch
from engine.config import Config, ConfigError


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
        _check_run_folder(config)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.print_config:
        print(cli.dump_yaml(config), end="")
        return 0
    if world_size > 1 and not launch.is_rank():
        return launch.start_ranks(world_size, argv)
    from engine.loop import train  # imports torch

    try:
        train(config, options.config)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _check_run_folder(config: Config) -> None:
    if config.name is not None and config.resume is None and os.path.exists(Path(config.output_dir) / config.name):
        folder = Path(config.output_dir) / config.name
        raise ConfigError(f"name: {folder} exists; go on with --resume {folder}, or give another --name")


if __name__ == "__main__":
    sys.exit(main())
