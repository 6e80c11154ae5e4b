"""``python -m engine.relabel --data.path pairs.jsonl --reward.model gold --output new``: pairs in a judge's order."""

from __future__ import annotations

from engine.config import ConfigError, cli
from engine.evaluation import checks, command, pairs, response_files, settings
from engine.machine import children, devices

USAGE = "python -m engine.relabel --data.path PAIRS --reward.model MODEL --output FILE.{jsonl,parquet}"
ABOUT = (
    "Has a judge say which answer of each pair is the better one, or which of several responses are the best and the "
    "worst, and writes the pairs in its order, for --algo dpo and --algo reward_model. A command that was killed goes "
    "on where it stopped."
)


def main(argv: list[str] | None = None) -> int:
    """Runs a command line; the exit status is 2 for what cannot work, in one line, and 1 where the judge fails."""
    return command.run(_relabel, argv)


def _relabel(argv: list[str]) -> None:
    options = cli.read_options(argv)
    given = settings.read(settings.Relabel, options, {}, usage=USAGE, description=ABOUT)
    if options.words:
        raise ConfigError(f"'{options.words[0]}' is no option: {USAGE}")
    output = command.new("output", given.output, "file, .jsonl or .parquet,")
    if output.suffix not in response_files.SUFFIXES:
        raise ConfigError(f"output: '{given.output}' must end with .jsonl or .parquet")
    config = settings.as_config(given, given.model.path or given.reward.model)
    checks.check_relabelled(given, config)
    candidates, without = pairs.read(given)
    device = devices.device_type(config)
    command.prepare_libraries(device)
    from engine.evaluation import relabelling

    relabelling.write(given, config, candidates, output, device, print, without=without)
    print(output)


if __name__ == "__main__":
    children.run(main)
