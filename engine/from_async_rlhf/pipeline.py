"""async_rlhf's scripts around its training on samples: SFT, reward model, relabelling, generation, evaluation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from engine.config import ConfigError, Section, cli
from engine.evaluation import settings
from engine.from_async_rlhf.pipeline_keys import TABLES, Table
from engine.from_async_rlhf.translation import adapters, launched, nested, numbers, one_of, place

COLUMNS = {"tldr": ("query", "reference_response"), "hh": ("prompt", "chosen")}
"""Where the rows of their tasks have prompt and answer."""
PRECISIONS = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16", "auto": None}
COMMANDS: dict[str, type[Section]] = {
    "engine.relabel": settings.Relabel,
    "engine.generate": settings.Generate,
    "engine.evaluate": settings.Evaluate,
}
"""The settings of those that are no training runs."""


@dataclass(frozen=True)
class Translated:
    """A command line of theirs in words of ours."""

    command: str
    """The module."""
    word: str | None
    """What it works on, where it is told that by a word."""
    settings: Section
    """For a file behind ``--config``, with nothing set that is not theirs."""
    notes: list[str]
    """A line for each key that has no part in it."""


def translate(
    script: str, theirs: dict[str, Any], processes: int = 1, launcher: dict[str, Any] | None = None
) -> Translated:
    """What a script of theirs does, by a command here.

    Args:
        script: one of ``TABLES``.
        theirs: its keys and values.
        processes: those that train.
        launcher: accelerate's file, with dotted keys.

    Raises:
        ConfigError: a key or value without a place in the table.
    """
    table = TABLES[script]
    for key in theirs:
        if key not in table.known:
            raise ConfigError(f"async_rlhf's {script} has no key '{key}' that this knows: leave it out")
    notes = [f"{key}: {table.left_out[key]}" for key in theirs if key in table.left_out]
    given = table.defaults | {key: value for key, value in theirs.items() if value is not None}
    translated = {table.renamed[key]: value for key, value in given.items() if key in table.renamed}
    if table.command == "engine.run":
        return _trained(script, table, given, translated, notes, processes, launcher)
    word = None
    dtype = one_of("torch_dtype", given.get("torch_dtype", "auto"), PRECISIONS)
    translated |= {} if dtype is None else {"model.dtype": dtype}
    if script == "relabel_with_rm.py":
        translated["data.templated"] = True  # their answers end with the name of the end of sequence
        if given["eval_split"]:
            notes.append(f"eval_split: relabel it by a second command, with --data.split {given['eval_split']}")
        _output(translated, given.get("output_name"))
    else:
        word = given.get("model_name_or_path")
        translated |= {"data.prompt_column": "query", "generation.backend": "vllm"}
        if script == "generate_for_eval.py":
            _output(translated, given.get("dataset_path"))
        else:
            translated |= {"baseline.column": "reference_response"}
            translated |= {"output": given["dataset_path"]} if "dataset_path" in given else {}
            if "dataset_name" not in given:
                raise ConfigError(
                    "dataset_name is missing: engine.evaluate samples too, so give the file of generate_for_eval.py by "
                    "a --config before this one's"
                )
    kind = COMMANDS[table.command]
    return Translated(table.command, word, cli.checked(kind, nested(translated)), notes)


def _output(translated: dict[str, Any], name: str | None) -> None:
    if name:
        translated["output"] = f"{name.rstrip('/').rpartition('/')[2]}.parquet"


def _trained(
    script: str,
    table: Table,
    given: dict[str, Any],
    translated: dict[str, Any],
    notes: list[str],
    processes: int,
    launcher: dict[str, Any] | None,
) -> Translated:
    """A run on rows."""
    translated["data.templated"] = True  # their rows hold the name of the end of sequence
    if script == "sft.py":
        prompt, answer = one_of("task_type", given["task_type"], COLUMNS)
        translated |= {"algo": "sft", "data.prompt_column": prompt, "data.completion_column": answer}
        translated |= {"data.max_row_tokens": given["max_seq_length"], "data.too_long": "cut"}
        read = given
    else:
        translated["algo"] = "reward_model"
        translated |= {"data.max_row_tokens": given["max_length"]} if "max_length" in given else {}
        read = {key: value for key, value in given.items() if key != "torch_dtype"}
    each = int(given["per_device_train_batch_size"]) * int(given["gradient_accumulation_steps"])
    translated["train.rows_per_step"] = each * processes
    translated["launch.ranks"] = processes
    longest = int(translated.get("data.max_row_tokens", 0)) * (2 if script == "reward_modeling.py" else 1)
    translated["train.tokens_per_microbatch"] = max(8192, longest)
    steps = int(given.get("max_steps", -1))
    translated |= {"train.steps": steps} if steps > 0 else {"train.epochs": given["num_train_epochs"]}
    strategy = given.get("eval_strategy", given.get("evaluation_strategy", "no"))
    _every(translated, notes, "eval", strategy, float(given["eval_steps"]), steps)
    _every(translated, notes, "save", given["save_strategy"], float(given["save_steps"]), steps)
    if given["lr_scheduler_type"] != "constant":  # which knows no warm-up
        translated["train.warmup_steps"] = given["warmup_steps"]
    adapters(translated, given)
    numbers(translated, read, launcher or {})
    place(translated, given)
    notes += launched(translated, launcher)
    if (launcher or {}).get("deepspeed_config.gradient_clipping") is None:
        translated["train.max_grad_norm"] = given["max_grad_norm"]
    tree = nested(translated)
    if "env" in given:
        tree["env"] = given["env"]
    return Translated(table.command, None, cli.validate(tree), notes)


def _every(translated: dict[str, Any], notes: list[str], what: str, strategy: Any, every: float, steps: int) -> None:
    """``eval.every_steps`` or ``save.every_steps``; below 1 theirs is a share of the run."""
    if strategy in ("no", False):  # which YAML reads as a truth value
        translated[f"{what}.every_steps"] = 0
    elif strategy == "epoch":
        notes.append(f"{what}_strategy epoch: there is none, {what}.every_steps keeps its default")
    elif every >= 1 or steps > 0:
        translated[f"{what}.every_steps"] = int(every) if every >= 1 else math.ceil(every * steps)
    else:
        notes.append(
            f"{what}_steps {every:g}: a share of a run whose steps follow from its rows: give {what}.every_steps"
        )
