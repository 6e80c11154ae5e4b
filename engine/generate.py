"""``python -m engine.generate runs/x --output responses.jsonl``: responses of a model to prompts."""

from __future__ import annotations

from engine.config import ConfigError, cli
from engine.evaluation import checks, command, places, response_files, settings
from engine.machine import children, devices

USAGE = "python -m engine.generate RUN_OR_MODEL --output FILE.{jsonl,parquet} [--section.key value ...]"
ABOUT = (
    "Samples responses of a run's model/, best/ or models/step-N, of one of its checkpoints, or of any model. What the "
    "run says about prompts, lengths and numbers is the default. A command that was killed goes on where it stopped."
)


def main(argv: list[str] | None = None) -> int:
    """Runs a command line; the exit status is 2 for what cannot work, in one line."""
    return command.run(_generate, argv)


def _generate(argv: list[str]) -> None:
    options = cli.read_options(argv)
    place = None if options.help else places.model(command.only_word(options.words, USAGE))
    checks.check_writes([place] if place else [])
    below = settings.of_run(settings.Generate, cli.load_run(place.run_dir)) if place and place.run_dir else {}
    given = settings.read(settings.Generate, options, below, usage=USAGE, description=ABOUT)
    assert place is not None
    output = command.new("output", given.output, "file, .jsonl or .parquet,")
    if output.suffix not in response_files.SUFFIXES:
        raise ConfigError(f"output: '{given.output}' must end with .jsonl or .parquet")
    config = settings.as_config(given, place.path)
    checks.check_sampled(given, config)
    device = devices.device_type(config)
    command.prepare_libraries(device)
    from engine.evaluation import sampling
    from engine.machine.world import joined

    with sampling.as_folder(place, print) as folder:
        work = sampling.task(given, place, folder, print)
        with joined(device, config.launch.timeout_minutes) as world:
            sampling.write(work, output, world, print)
    print(output)


if __name__ == "__main__":
    children.run(main)
