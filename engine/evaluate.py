"""``python -m engine.evaluate runs/x``: win rates, KL and other figures about models."""

from __future__ import annotations

from pathlib import Path

from engine.config import ConfigError, cli
from engine.evaluation import checks, command, entries, settings
from engine.machine import children, devices, disk

USAGE = "python -m engine.evaluate RUN_OR_MODEL [MODEL ...] [--section.key value ...]"
ABOUT = (
    "Samples responses of a run's models (the one it began with, models/step-N, best and model), or of any models, has "
    "them judged, and writes a table, evaluation.json and a picture of win rate against KL. What the run says about "
    "prompts, lengths, numbers and rewards is the default. A command that was killed goes on where it stopped."
)


def main(argv: list[str] | None = None) -> int:
    """Runs a command line; the exit status is 2 for what cannot work, in one line, and 1 where the judge fails."""
    return command.run(_evaluate, argv)


def _evaluate(argv: list[str]) -> None:
    options = cli.read_options(argv)
    models, run_dir = ([], None) if options.help else entries.named(options.words)
    checks.check_writes(models)
    run = cli.load_run(run_dir) if run_dir else None
    below = settings.of_run(settings.Evaluate, run) if run else {}
    given = settings.read(settings.Evaluate, options, below, usage=USAGE, description=ABOUT)
    config = settings.as_config(given, models[0].path)
    checks.check_sampled(given, config)
    checks.check_judge(given)
    entries.baseline(given.baseline.model, models)
    whole = len(options.words) == 1 and models[0].name == entries.BASE
    folder = given.output or (run_dir / "evaluation" if run_dir and whole else None)
    if folder is None:
        raise ConfigError("--output is missing: the folder of the results")
    folder = Path(folder).expanduser()
    disk.probe("output", folder)
    device = devices.device_type(config)
    command.prepare_libraries(device)
    from engine.evaluation import evaluating

    (folder / "responses").mkdir(parents=True, exist_ok=True)
    evaluating.evaluate(given, models, run, folder, device, print)


if __name__ == "__main__":
    children.run(main)
