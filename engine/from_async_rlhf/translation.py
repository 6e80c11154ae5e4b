"""A training run of async_rlhf on sampled responses as a run of Tandem.

Every key is either translated, or named in a note with the reason why not; an unknown one is refused.
docs/from-async-rlhf.md has the same table.
"""

from __future__ import annotations

import math
import os
from typing import Any

from engine.config import Config, ConfigError, cli
from engine.from_async_rlhf.keys import (
    DEFAULTS,
    DERIVED,
    FOREIGN,
    IGNORED,
    LAUNCHER,
    LAUNCHER_LEFT_OUT,
    LEFT_OUT,
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
    numbers(translated, given, launcher or {})
    place(translated, given)
    notes += launched(translated, launcher)
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
        translated["dpo.loss"] = one_of("loss_type", given.get("loss_type", "sigmoid"), LOSSES)
    if "cliprange" in given:
        translated |= {"train.clip_low": given["cliprange"], "train.clip_high": given["cliprange"]}
    if given.get("non_eos_penalty"):
        translated["rollout.missing_eos_reward"] = given["penalty_reward_value"]
    adapters(translated, given)


def adapters(translated: dict[str, Any], given: dict[str, Any]) -> None:
    """LoRA's settings, where theirs has it."""
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


def numbers(translated: dict[str, Any], given: dict[str, Any], launcher: dict[str, Any]) -> None:
    """What models compute in, the learning rate's schedule, Adam's decay rates."""
    mixed = "bf16" if given.get("bf16") else "fp16" if given.get("fp16") else None
    if mixed is None and "torch_dtype" in given:
        dtype = one_of("torch_dtype", given["torch_dtype"], DTYPES)
    else:
        dtype = one_of("mixed_precision", mixed or launcher.get("mixed_precision") or "no", PRECISIONS)
    translated["model.dtype"] = dtype or "float32"
    translated["train.schedule"] = one_of("lr_scheduler_type", given["lr_scheduler_type"], SCHEDULES)
    translated["train.adam_betas"] = [given["adam_beta1"], given["adam_beta2"]]


def place(translated: dict[str, Any], given: dict[str, Any]) -> None:
    """Where the run lies, and where its metrics and its model go."""
    parent, name = os.path.split(str(given.get("output_dir", "")).rstrip("/"))
    if parent := given.get("output_global_parent_dir", parent):
        translated["output_dir"] = parent
    if name:
        translated["name"] = name
    to = given.get("report_to")
    if "wandb" in (to if isinstance(to, list) else [to]):
        translated["report.wandb"] = str((given.get("env") or {}).get("WANDB_PROJECT", "huggingface"))
    if given.get("push_to_hub") and "hub_model_id" in given:
        translated["push.hub_id"] = given["hub_model_id"]


def launched(translated: dict[str, Any], launcher: dict[str, Any] | None) -> list[str]:
    """What the launcher's file decides; notes for what it does not."""
    launcher = launcher or {}
    for key in launcher:
        if key not in LAUNCHER | LAUNCHER_LEFT_OUT:
            raise ConfigError(f"accelerate's file has no key '{key}' that this knows: leave it out")
    kind = str(launcher.get("distributed_type", "NO"))
    clip = one_of("distributed_type", kind, DISTRIBUTED)
    translated["train.max_grad_norm"] = launcher.get("deepspeed_config.gradient_clipping", clip)
    if kind == "DEEPSPEED":
        translated["train.zero_stage"] = launcher.get("deepspeed_config.zero_stage", 2)
    return [f"{key}: {LAUNCHER_LEFT_OUT[key]}" for key in launcher if key in LAUNCHER_LEFT_OUT]


def one_of(key: str, value: Any, allowed: dict[str, Any]) -> Any:
    """What ``allowed`` has for a value; raises ConfigError for one that it does not have."""
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
