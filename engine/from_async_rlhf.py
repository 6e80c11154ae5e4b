"""A run of async_rlhf as a run of Tandem: python -m engine.from_async_rlhf SCRIPT.py --config THEIR.yml [--key value]

SCRIPT.py is one of async_rlhf's (online_dpo.py, rloo.py, ppov2.py), and the command line otherwise what it would get;
what comes out is a configuration for ``--config``. Every key is either translated, or named in a comment with the
reason why not; an unknown one is refused. docs/from-async-rlhf.md has the same table.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import yaml

from engine import cli
from engine.config import ConfigError

SCRIPTS = {"online_dpo.py": "online_dpo", "rloo.py": "rloo", "ppov2.py": "ppo"}

RENAMED = {
    "model_name_or_path": "model.path",
    "reward_model_path": "reward.model",
    "dataset_name": "data.path",
    "dataset_train_split": "data.split",
    "dataset_test_split": "data.eval_split",
    "max_length": "rollout.max_prompt_tokens",
    "response_length": "rollout.max_response_tokens",
    "temperature": "generation.temperature",
    "learning_rate": "train.learning_rate",
    "num_ppo_epochs": "train.epochs_per_batch",
    "num_mini_batches": "train.minibatches_per_batch",
    "cliprange_value": "ppo.value_clip",
    "vf_coef": "ppo.value_coef",
    "gamma": "ppo.gamma",
    "lam": "ppo.lam",
    "kl_coef": "kl.coef",
    "beta": "dpo.beta",
    "label_smoothing": "dpo.label_smoothing",
    "rloo_k": "rollout.samples_per_prompt",
    "gradient_checkpointing": "model.gradient_checkpointing",
    "max_grad_norm": "train.max_grad_norm",
    "adam_epsilon": "train.adam_eps",
    "weight_decay": "train.weight_decay",
    "warmup_steps": "train.warmup_steps",
    "seed": "seed",
    "output_dir": "output_dir",
    "lora_r": "lora.rank",
    "lora_alpha": "lora.alpha",
}
"""Keys that mean the same under another name."""

DERIVED = {
    "sft_model_path": "model.path; in PPO the value model starts from reward_model_path (model.value_path)",
    "total_episodes": "train.steps: this over the batch",
    "per_device_train_batch_size": "rollout.prompts_per_step: times accumulation, minibatches and training processes",
    "gradient_accumulation_steps": "rollout.prompts_per_step; microbatches are filled by train.tokens_per_microbatch",
    "loss_type": "dpo.loss: sigmoid, ipo or hinge",
    "cliprange": "train.clip_low and train.clip_high",
    "non_eos_penalty": "rollout.missing_eos_reward, if true",
    "penalty_reward_value": "rollout.missing_eos_reward, if non_eos_penalty is true",
    "stop_token": "nothing for eos, which always stops; else generation.stop_tokens",
    "vllm": "generation.backend vllm, and schedule.placement split unless single",
    "single": "schedule.placement colocated",
    "sync": "schedule.staleness: 0 if true, 1 if false, where vllm is",
    "bok": "algo bok",
    "bf16": "model.dtype bfloat16",
    "fp16": "model.dtype float16 (theirs is mixed precision over fp32 weights; DeepSpeed keeps fp32 master weights)",
    "torch_dtype": "model.dtype, where neither bf16 nor fp16 is true",
    "lr_scheduler_type": "train.schedule",
    "save_steps": "save.every_steps; a share below 1 is one of train.steps",
    "eval_steps": "eval.every_steps; a share below 1 is one of train.steps",
    "adam_beta1": "train.adam_betas",
    "adam_beta2": "train.adam_betas",
    "use_peft": "lora.rank, by lora_r",
    "lora_target_modules": "lora.target_modules",
    "env": "env",
}
"""Keys that others take part in."""

_PLAN = "the memory plan decides"
_PACKED = "sequences are packed by train.tokens_per_microbatch"
_REPORT = "runs write report.html, metrics.jsonl and TensorBoard events by themselves"
_PLACE = "runs lie in output_dir/name"
LEFT_OUT = {
    "vllm_device": "the last schedule.generators ranks generate",
    "vllm_gpu_memory_utilization": _PLAN,
    "local_rollout_forward_batch_size": _PACKED,
    "per_device_eval_batch_size": _PACKED,
    "whiten_rewards": "PPO whitens advantages (ppo.whiten_advantages), over all ranks; rewards are never whitened",
    "output_global_parent_dir": _PLACE,
    "wandb_run_id": _PLACE,
    "run_name": _PLACE,
    "report_to": _REPORT,
    "logging_steps": _REPORT,
    "save_generations": "save.samples_per_step: samples.jsonl",
    "num_sample_generations": "save.samples_per_step: samples.jsonl",
    "save_strategy": "by save.every_steps",
    "evaluation_strategy": "by eval.every_steps",
    "eval_strategy": "by eval.every_steps",
    "hub_strategy": "nothing is uploaded",
    "push_to_hub": "nothing is uploaded",
    "hub_model_id": "nothing is uploaded",
    "num_train_epochs": "train.steps counts batches",
    "sanity_check": "give --train.steps and a small data file",
    "ddp_find_unused_parameters": "DeepSpeed trains on any number of ranks",
    "deepspeed": "train.zero_stage",
    "config": "its values are here",
}
"""Keys without a counterpart, and why."""

DTYPES = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32", "auto": "float32"}
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_mini_batches": 1,
    "num_ppo_epochs": 4,
    "rloo_k": 2,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "response_length": 53,
    "max_length": 512,
    "temperature": 0.7,
    "kl_coef": 0.05,
    "penalty_reward_value": -1,
}
"""async_rlhf's own, where a run of it depends on them and Tandem's are others."""


def translate(script: str, theirs: dict[str, Any], processes: int) -> tuple[dict[str, Any], list[str]]:
    """Tandem's configuration as dotted keys, and a line for each key that has no part in it.

    Args:
        script: of async_rlhf.
        theirs: its keys and values.
        processes: those that train; a vLLM beside them is one more.

    Raises:
        ConfigError: a key or value that neither knows.
    """
    if script not in SCRIPTS:
        raise ConfigError(f"'{script}' is none of {', '.join(SCRIPTS)}")
    for key in theirs:
        if key not in RENAMED and key not in DERIVED and key not in LEFT_OUT:
            raise ConfigError(f"async_rlhf has no key '{key}' that this knows: leave it out")
    notes = [f"{key}: {LEFT_OUT[key]}" for key in theirs if key in LEFT_OUT]
    given = DEFAULTS | theirs
    algo = "bok" if given.get("bok") else SCRIPTS[script]
    found = {RENAMED[key]: value for key, value in given.items() if key in RENAMED}
    found |= {"algo": algo, "data.prompt_column": "query"}
    if "sft_model_path" in given:
        found["model.path"] = given["sft_model_path"]
    if algo == "ppo":
        found.pop("rollout.samples_per_prompt", None)
        found |= {"rollout.samples_per_prompt": 1, "model.value_path": given.get("reward_model_path")}
    if algo == "online_dpo":
        found["dpo.loss"] = _one_of("loss_type", given.get("loss_type", "sigmoid"), ("sigmoid", "ipo", "hinge"))
    _batches(found, given, algo, processes)
    _placement(found, given, processes)
    _numbers(found, given)
    for theirs_key, key in (("save_steps", "save.every_steps"), ("eval_steps", "eval.every_steps")):
        if theirs_key in given and "train.steps" in found:
            every = float(given[theirs_key])
            found[key] = max(1, round(every * found["train.steps"] if every < 1 else every))
    if given.get("non_eos_penalty"):
        found["rollout.missing_eos_reward"] = float(given["penalty_reward_value"])
    if (stop := given.get("stop_token", "eos")) != "eos":
        found["generation.stop_tokens"] = [stop]
    if not given.get("use_peft"):
        found = {key: value for key, value in found.items() if not key.startswith("lora.")}
    elif "lora_target_modules" in given:
        found["lora.target_modules"] = given["lora_target_modules"]
    return found | {f"env.{key}": value for key, value in (given.get("env") or {}).items()}, notes


def _batches(found: dict[str, Any], given: dict[str, Any], algo: str, processes: int) -> None:
    """Their batch counts responses in RLOO, which divides it among K, and prompts in the others."""
    each = given["per_device_train_batch_size"] * given["gradient_accumulation_steps"] * given["num_mini_batches"]
    batch = int(each) * processes
    found["rollout.prompts_per_step"] = batch // int(given["rloo_k"]) if algo == "rloo" else batch
    longest = int(given["max_length"]) + int(given["response_length"])
    found["train.tokens_per_microbatch"] = max(8192, 2 * longest)
    if "total_episodes" in given:
        found["train.steps"] = -(-int(given["total_episodes"]) // batch)


def _placement(found: dict[str, Any], given: dict[str, Any], processes: int) -> None:
    ranks = processes
    if given.get("vllm"):
        found["generation.backend"] = "vllm"
        if not given.get("single"):
            found["schedule.placement"] = "split"
            ranks += 1
        found["schedule.staleness"] = 0 if given.get("sync") else 1
    found["launch.ranks"] = ranks


def _numbers(found: dict[str, Any], given: dict[str, Any]) -> None:
    chosen = "bfloat16" if given.get("bf16") else "float16" if given.get("fp16") else given.get("torch_dtype")
    found["model.dtype"] = DTYPES[_one_of("torch_dtype", chosen or "auto", tuple(DTYPES))]
    found["train.schedule"] = SCHEDULES[_one_of("lr_scheduler_type", given["lr_scheduler_type"], tuple(SCHEDULES))]
    if "cliprange" in given:
        found |= {"train.clip_low": given["cliprange"], "train.clip_high": given["cliprange"]}
    if "adam_beta1" in given or "adam_beta2" in given:
        found["train.adam_betas"] = [given.get("adam_beta1", 0.9), given.get("adam_beta2", 0.999)]


def _one_of(key: str, value: Any, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ConfigError(f"{key} {value} has no counterpart: it can be {', '.join(allowed)}")
    return str(value)


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


def read(argv: list[str]) -> tuple[str, dict[str, Any], int]:
    """The script, its keys (those of the command line over those of the file), and the training processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", choices=SCRIPTS)
    parser.add_argument("--config", help="their YAML file")
    parser.add_argument("--processes", type=int, default=1, help="training processes they would be started with")
    options, rest = parser.parse_known_args(argv)
    theirs = cli.load_yaml(options.config) if options.config else {}
    while rest:
        key, *rest = rest
        if not key.startswith("--"):
            raise ConfigError(f"'{key}' is not an option")
        value, rest = (rest[0], rest[1:]) if rest and not rest[0].startswith("--") else ("true", rest)
        theirs[key.removeprefix("--")] = yaml.safe_load(value)
    return options.script, theirs, options.processes


def main(argv: list[str] | None = None) -> int:
    """Prints the configuration; 2 for what cannot be translated."""
    try:
        script, theirs, processes = read(sys.argv[1:] if argv is None else argv)
        found, notes = translate(script, theirs, processes)
        cli.validate(nested(found))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"# From async_rlhf's {script}, {processes} training process(es).")
    for note in notes:
        print(f"# Not here: {note}")
    print(yaml.safe_dump(nested(found), sort_keys=False), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
