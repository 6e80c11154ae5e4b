"""``python -m engine.export runs/x --output folder``: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from engine.config import ConfigError, cli
from engine.evaluation import command, places, settings
from engine.machine import children
from engine.models import hub

USAGE = "python -m engine.export RUN_OR_CHECKPOINT --output FOLDER [--dtype NUMBERS] [--lora merged|adapter]"
ABOUT = (
    "Writes a checkpoint of a run, its newest one by default, as a Hugging Face folder: weights, tokenizer, chat "
    "template, generation settings, model card."
)


def main(argv: list[str] | None = None) -> int:
    """Runs a command line; the exit status is 2 for what cannot work, in one line."""
    return command.run(_export, argv)


def _export(argv: list[str]) -> None:
    options = cli.read_options(argv)
    given = settings.read(settings.Export, options, {}, usage=USAGE, description=ABOUT)
    place = places.checkpoint(command.only_word(options.words, USAGE))
    assert place.run_dir is not None
    if given.lora == "adapter" and not cli.load_run(place.run_dir).lora.rank:
        raise ConfigError(f"lora adapter: {place.run_dir} trained the policy's own weights, there is no adapter")
    folder = command.new("output", given.output, "folder")
    if given.push.hub_id is not None:
        hub.check("push.hub_id")
    command.prepare_libraries("cpu")
    from engine.evaluation import exporting

    exporting.write(place, folder, dtype=given.dtype, form=given.lora, say=print)
    print(f"{folder}: step {place.step} of {place.run_dir}")
    if given.push.hub_id is not None:
        print(f"on the hub: {hub.push(folder, given.push.hub_id, given.push.private)}")


if __name__ == "__main__":
    children.run(main)
