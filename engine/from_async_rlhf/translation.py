"""A run of async_rlhf as a run of Tandem: python -m engine.from_async_rlhf SCRIPT.py --config THEIR.yml [--key value]

SCRIPT.py is one of async_rlhf's (online_dpo.py, rloo.py, ppov2.py), and the command line otherwise what it would get;
what comes out is a configuration for ``--config``. Every key is either translated, or named in a comment with the
reason why not; an unknown one is refused. docs/from-async-rlhf.md has the same table.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from typing import Any

import yaml

from engine.config import Config, ConfigError, cli, yaml_file
from engine.from_async_rlhf.keys import (
    DEFAULTS,
    DERIVED,
    FOREIGN,
    IGNORED,
    LAUNCHER,
    LAUNCHER_LEFT_OUT,
    LEFT_OUT,
    NOT_YET,
    RENAMED,
    SCRIPTS,
)

LOSSES = {"sigmoid": "sigmoid", "ipo": "ipo"}
PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "no": None}
DTYPES = {"bfloat16": "bfloat16", "float16": "float32", "float32": "float32"}
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
DISTRIBUTED = {"DEEPSPEED": 1.0, "MULTI_GPU": 0.0, "NO": 0.0}
"""Their gradient clipping if the launcher's file does not say: DeepSpeed's by accelerate, none elsewhere."""


def translate(
    script: str, theirs: dict[str, Any], processes: int = 1, launcher: dict[str, Any] | None = None
) -> tuple[Config, list[str]]:
    """Tandem's configuration, with nothing set that is not theirs, and a line for each key that has no part in it.

    Args:
        script: of async_rlhf.
        theirs: its keys and values.
        processes: those that train; a vLLM beside them is one more.
        launcher: accelerate's file, with dotted keys. Default: the script was started without one.

    Raises:
        ConfigError: a key or value without a place in the table, or a run whose length cannot be told.
    """
    if script not in SCRIPTS:
        raise ConfigError(f"'{script}' is none of {', '.join(SCRIPTS)}")
    for key in theirs:
        if key in NOT_YET:
            raise ConfigError(f"'{key}' is a key of {NOT_YET[key]}, which has no counterpart here yet")
        if key in FOREIGN[script] or key not in RENAMED | DERIVED | LEFT_OUT:
            raise ConfigError(f"async_rlhf's {script} has no key '{key}' that this knows: leave it out")
    unread = IGNORED if SCRIPTS[script] != "online_dpo" else set()
    notes = [f"{key}: {LEFT_OUT[key]}" for key in theirs if key in LEFT_OUT]
    notes += [f"{key}: {script} does not read it" for key in theirs if key in unread]
    given = DEFAULTS | {key: value for key, value in theirs.items() if value is not None and key not in unread}
    algo = "bok" if given.get("bok") else SCRIPTS[script]
    translated = {RENAMED[key]: value for key, value in given.items() if key in RENAMED}
    translated |= {"algo": algo, "data.prompt_column": "query"}
    _algorithm(translated, given, algo)
    _batches(translated, given, algo, processes)
    _intervals(translated, given)
    _placement(translated, given, processes)
    _numbers(translated, given, launcher or {})
    _place(translated, given)
    notes += _launched(translated, launcher)
    tree = nested(translated)
    if "env" in given:
        tree["env"] = given["env"]
    return cli.validate(tree), notes


def _algorithm(translated: dict[str, Any], given: dict[str, Any], algo: str) -> None:
    if algo == "ppo":
        translated |= {"rollout.samples_per_prompt": 1, "model.value_path": given["reward_model_path"]}
    if algo in ("ppo", "rloo"):
        translated["kl.coef"] = given["kl_coef"]
    if algo == "online_dpo":
        translated["dpo.loss"] = _one_of("loss_type", given.get("loss_type", "sigmoid"), LOSSES)
    if "cliprange" in given:
        translated |= {"train.clip_low": given["cliprange"], "train.clip_high": given["cliprange"]}
    if given.get("non_eos_penalty"):
        translated["rollout.missing_eos_reward"] = given["penalty_reward_value"]
    if given.get("use_peft"):
        modules = given.get("lora_target_modules", "all-linear")
        translated |= {"lora.rank": given["lora_r"], "lora.alpha": given["lora_alpha"]}
        translated["lora.target_modules"] = [] if modules in ("all-linear", ["all-linear"]) else modules


def _batches(translated: dict[str, Any], given: dict[str, Any], algo: str, processes: int) -> None:
    """Their batch counts responses in RLOO, which divides it among K, and prompts in the others."""
    each = given["per_device_train_batch_size"] * given["gradient_accumulation_steps"] * given["num_mini_batches"]
    batch = int(each) * processes
    if "total_episodes" not in given:
        raise ConfigError("total_episodes is missing: give it, as passes over the data times the prompts in it")
    translated["train.steps"] = math.ceil(int(given["total_episodes"]) / batch)
    translated["rollout.prompts_per_step"] = batch // int(given["rloo_k"]) if algo == "rloo" else batch
    longest = int(given["max_length"]) + int(given["response_length"])
    translated["train.tokens_per_microbatch"] = max(8192, 2 * longest)


def _intervals(translated: dict[str, Any], given: dict[str, Any]) -> None:
    steps, minibatches, epochs = translated["train.steps"], int(given["num_mini_batches"]), int(given["num_ppo_epochs"])
    updates = minibatches * epochs
    every = float(given["save_steps"])
    if every < 1:  # of the updates that theirs counts on, which forget the epochs where transformers samples
        every = math.ceil(every * steps * minibatches * (epochs if given.get("vllm") else 1))
    saves = given["save_strategy"] == "steps"
    translated["save.every_steps"] = max(1, round(every / updates)) if saves else 0
    generations = int(given["num_sample_generations"])
    translated["eval.every_steps"] = max(1, steps // generations) if generations else 0
    if given["lr_scheduler_type"] != "constant":  # which knows no warm-up
        translated["train.warmup_steps"] = int(given["warmup_steps"]) * updates


def _placement(translated: dict[str, Any], given: dict[str, Any], processes: int) -> None:
    ranks = processes
    if given.get("vllm"):
        translated["generation.backend"] = "vllm"
        if not given.get("single"):
            translated["schedule.placement"] = "split"
            ranks += 1
        translated["schedule.staleness"] = 0 if given.get("sync") else 1
    else:
        translated["generation.max_batch"] = given["local_rollout_forward_batch_size"]
    translated["launch.ranks"] = ranks


def _numbers(translated: dict[str, Any], given: dict[str, Any], launcher: dict[str, Any]) -> None:
    mixed = "bf16" if given.get("bf16") else "fp16" if given.get("fp16") else None
    if mixed is None and "torch_dtype" in given:
        dtype = _one_of("torch_dtype", given["torch_dtype"], DTYPES)
    else:
        dtype = _one_of("mixed_precision", mixed or launcher.get("mixed_precision") or "no", PRECISIONS)
    translated["model.dtype"] = dtype or "float32"
    translated["train.schedule"] = _one_of("lr_scheduler_type", given["lr_scheduler_type"], SCHEDULES)
    translated["train.adam_betas"] = [given["adam_beta1"], given["adam_beta2"]]


def _place(translated: dict[str, Any], given: dict[str, Any]) -> None:
    parent, name = os.path.split(str(given.get("output_dir", "")).rstrip("/"))
    if parent := given.get("output_global_parent_dir", parent):
        translated["output_dir"] = parent
    if name:
        translated["name"] = name


def _launched(translated: dict[str, Any], launcher: dict[str, Any] | None) -> list[str]:
    """What the launcher's file decides; notes for what it does not."""
    launcher = launcher or {}
    for key in launcher:
        if key not in LAUNCHER | LAUNCHER_LEFT_OUT:
            raise ConfigError(f"accelerate's file has no key '{key}' that this knows: leave it out")
    kind = str(launcher.get("distributed_type", "NO"))
    clip = _one_of("distributed_type", kind, DISTRIBUTED)
    translated["train.max_grad_norm"] = launcher.get("deepspeed_config.gradient_clipping", clip)
    if kind == "DEEPSPEED":
        translated["train.zero_stage"] = launcher.get("deepspeed_config.zero_stage", 2)
    return [f"{key}: {LAUNCHER_LEFT_OUT[key]}" for key in launcher if key in LAUNCHER_LEFT_OUT]


def _one_of(key: str, value: Any, allowed: dict[str, Any]) -> Any:
    if value not in allowed:
        raise ConfigError(f"{key} {value} has no counterpart: it can be {', '.join(allowed)}")
    return allowed[value]


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys as sections."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, leaf = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = value
    return tree


def read(argv: list[str]) -> tuple[str, dict[str, Any], int, dict[str, Any] | None]:
    """The arguments of ``translate``; keys of the command line go over those of the file, as theirs do."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("script", choices=SCRIPTS)
    parser.add_argument("--config", help="their YAML file")
    parser.add_argument("--accelerate", help="the YAML file that accelerate launch would get")
    parser.add_argument(
        "--processes", type=int, help="training processes they would be started with. Default: accelerate's, or 1"
    )
    options, rest = parser.parse_known_args(argv)
    theirs = yaml_file.read(options.config) if options.config else {}
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
        config, notes = translate(script, theirs, processes, launcher)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"# From async_rlhf's {script}, {processes} training process(es).")
    for note in notes:
        print(f"# Not here: {note}")
    print(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True), sort_keys=False), end="")
    return 0
