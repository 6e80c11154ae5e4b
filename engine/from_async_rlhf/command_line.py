"""A command of async_rlhf in other words: python -m engine.from_async_rlhf SCRIPT.py --config THEIR.yml [--key value]

SCRIPT.py is one of async_rlhf's, and the command line otherwise what it would get; what comes out is a configuration
for --config of the command that its first line names. Every key is either translated, or named in a comment with the
reason why not; an unknown one is refused. docs/from-async-rlhf.md has the same tables.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import yaml

from engine.config import ConfigError, Section, yaml_file
from engine.from_async_rlhf import pipeline, translation
from engine.from_async_rlhf.keys import SCRIPTS
from engine.from_async_rlhf.pipeline_keys import TABLES


def read(argv: list[str]) -> tuple[str, dict[str, Any], int, dict[str, Any] | None]:
    """The arguments of both ``translate``; keys of the command line go over those of the file, as theirs do."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("script", choices=[*SCRIPTS, *TABLES])
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        help="their YAML file; load_and_eval.py takes that of generate_for_eval.py before its own",
    )
    parser.add_argument("--accelerate", help="the YAML file that accelerate launch would get")
    parser.add_argument(
        "--processes", type=int, help="training processes they would be started with. Default: accelerate's, or 1"
    )
    options, rest = parser.parse_known_args(argv)
    theirs = {key: value for file in options.config for key, value in yaml_file.read(file).items()}
    while rest:
        key, *rest = rest
        if not key.startswith("--"):
            raise ConfigError(f"'{key}' is not an option")
        key, _, joined = key.removeprefix("--").partition("=")
        values = [joined] if joined else []
        while rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        read_values = [yaml.safe_load(value) for value in values or ["true"]]
        listed = key == "lora_target_modules"
        theirs[key.replace("-", "_")] = read_values if listed or len(read_values) > 1 else read_values[0]
    launcher = None
    if options.accelerate:
        launcher = yaml_file.read(options.accelerate)
        inner = launcher.pop("deepspeed_config", None) or {}
        launcher |= {f"deepspeed_config.{key}": value for key, value in inner.items()}
    processes = options.processes or int((launcher or {}).get("num_processes", 1))
    return options.script, theirs, processes, launcher


def main(argv: list[str] | None = None) -> int:
    """Prints the configuration; 2 for what cannot be translated."""
    try:
        script, theirs, processes, launcher = read(sys.argv[1:] if argv is None else argv)
        settings: Section
        if script in SCRIPTS:
            settings, notes = translation.translate(script, theirs, processes, launcher)
            said = f"{processes} training process(es), python -m engine.run --config THIS_FILE"
        else:
            found = pipeline.translate(script, theirs, processes, launcher)
            settings, notes = found.settings, found.notes
            words = "" if TABLES[script].command in ("engine.run", "engine.relabel") else f" {found.word or 'MODEL'}"
            said = f"python -m {found.command}{words} --config THIS_FILE"
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"# From async_rlhf's {script}: {said}")
    for note in notes:
        print(f"# Not here: {note}")
    print(yaml.safe_dump(settings.model_dump(mode="json", exclude_unset=True), sort_keys=False), end="")
    return 0
