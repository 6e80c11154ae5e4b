"""What no key of the configuration can tell alone: arithmetic of batches, combinations, files that must exist."""

from __future__ import annotations

import os
import shutil
import sysconfig

from engine.config import Config, ConfigError, user_code
from engine.data import checks as data_checks
from engine.models import model_folder
from engine.start import row_checks


def check(config: Config, world_size: int, device_type: str) -> None:
    """Checks what no single key can: arithmetic of batches, combinations, files that must exist.

    Args:
        world_size: ranks of the run.
        device_type: ``cpu`` or ``cuda``.

    Raises:
        ConfigError: with one line for the first thing that is wrong and what to do about it.
    """
    _check_sources(config)
    row_checks.check(config)
    _check_schedule(config, world_size)
    _check_batches(config, world_size - config.generating_ranks)
    if config.generation.top_p != 1.0:
        raise ConfigError(
            f"generation.top_p is {config.generation.top_p}, but training needs 1: truncated sampling biases the "
            "policy ratio by the probability mass it keeps"
        )
    if config.rollout.missing_eos_penalty is not None and config.rollout.missing_eos_reward is not None:
        raise ConfigError(
            "rollout.missing_eos_penalty lowers the reward, rollout.missing_eos_reward replaces it: give one"
        )
    _check_algorithm(config)
    if config.resume is None:  # a run that goes on cannot give its models up, also where it has no KL penalty any more
        _check_other_models(config)
    _check_sampler(config, world_size, device_type)
    home = {"triton": "cuda", "cpu": "cpu"}.get(config.train.kernel_backend or "", device_type)
    if home != device_type:
        raise ConfigError(
            f"train.kernel_backend {config.train.kernel_backend} runs on {home}, this run on {device_type}: "
            "leave it out"
        )
    if config.model.dtype == "float16" and device_type == "cpu":
        raise ConfigError("model.dtype float16 cannot train on a CPU: take float32 or bfloat16")
    _check_optimizer_offload(config)


def _check_algorithm(config: Config) -> None:
    name = config.algorithm.name
    if config.kl.target is not None and config.kl.coef == 0:
        raise ConfigError("kl.target needs a starting kl.coef above 0: the adaptive coefficient moves by factors")
    if config.kl.target is not None and config.algorithm.kl is None:
        raise ConfigError(f"kl.target steers the KL penalty, and {name} has none: leave it out")
    if config.eval.samples_per_prompt > 1 and config.eval.temperature == 0:
        raise ConfigError(
            "eval.samples_per_prompt above 1 needs an eval.temperature above 0: greedy responses are all the same"
        )
    if config.off_policy.correction is False and config.schedule.staleness > 0 and config.algorithm.policy_ratio:
        raise ConfigError("off_policy.correction cannot be off with schedule.staleness > 0")
    if config.off_policy.correction and not config.algorithm.policy_ratio:
        raise ConfigError(
            f"off_policy.correction weighs a policy ratio, and {name} has none: it learns from samples of any "
            "policy as they are; leave it out"
        )
    if config.rollout.samples_per_prompt < config.algorithm.least_group:
        raise ConfigError(
            f"rollout.samples_per_prompt is {config.rollout.samples_per_prompt}, but {name} compares a response "
            f"with the others to its prompt: it needs at least {config.algorithm.least_group}"
        )
    if fault := config.algorithm.fault(config.algorithm_settings):
        raise ConfigError(fault)
    if config.algorithm.kl != "loss" and config.kl.estimator not in (None, "k1"):
        place = "has the KL in its reward" if config.algorithm.kl else "has none"
        raise ConfigError(f"kl.estimator {config.kl.estimator} belongs into a loss, but {name} {place}: leave it out")
    if config.value_warmup_steps >= config.train.steps:
        raise ConfigError(
            f"{config.algorithm.section}.value_warmup_steps ({config.value_warmup_steps}) leaves none of train.steps "
            f"({config.train.steps}) to train the policy"
        )


def _check_other_models(config: Config) -> None:
    name, model = config.algorithm.name, config.model
    if model.value_path is not None and not config.algorithm.value_model:
        raise ConfigError(f"model.value_path is a value model to start from, and {name} has none: leave it out")
    if model.reference_path is not None and not config.has_reference:
        why = f"{name} has none" if config.algorithm.kl is None else "without a KL penalty (kl.coef 0) there is none"
        raise ConfigError(f"model.reference_path is the frozen reference policy, and {why}: leave it out")


def _check_optimizer_offload(config: Config) -> None:
    if config.train.optimizer_offload == "none":
        return
    if config.train.zero_stage < 2:
        raise ConfigError(
            f"train.optimizer_offload cpu goes with ZeRO-2 and 3, and train.zero_stage is {config.train.zero_stage}: "
            "set it to 2"
        )
    if config.model.dtype == "float16":
        raise ConfigError("train.optimizer_offload cpu does not go with model.dtype float16: take bfloat16")
    if config.memory.offload == "on":
        raise ConfigError(
            "memory.offload on takes optimizer states to host memory and back to the GPU, where "
            "train.optimizer_offload cpu never has them: give one"
        )
    # The virtual environment, where pip puts ninja, need not be in PATH.
    folders = os.pathsep.join([os.environ.get("PATH", ""), sysconfig.get_path("scripts")])
    for program in ((os.environ.get("CXX") or "c++").split()[0], "ninja"):
        if not shutil.which(program, path=folders):
            raise ConfigError(
                f"train.optimizer_offload cpu needs '{program}': DeepSpeed compiles its optimizer at its first use"
            )


def _check_schedule(config: Config, world_size: int) -> None:
    schedule = config.schedule
    if schedule.placement == "split":
        if world_size <= schedule.generators:
            raise ConfigError(
                f"schedule.placement split needs ranks that train besides the {schedule.generators} that generate "
                f"(schedule.generators), and this run has {world_size} in all: set launch.ranks, or take fewer"
            )
        _check_awake(config, "with schedule.placement split, where nobody makes room for anybody")
        if config.rollout.prompts_per_step % schedule.generators:
            raise ConfigError(
                f"rollout.prompts_per_step ({config.rollout.prompts_per_step}) must be a multiple of "
                f"schedule.generators ({schedule.generators})"
            )
    elif schedule.generators != 1:
        raise ConfigError("schedule.generators goes with schedule.placement split: leave it out")
    elif schedule.staleness > 1:
        raise ConfigError(
            f"schedule.staleness {schedule.staleness} needs schedule.placement split: on the same devices "
            "generation can be one batch ahead at most"
        )
    elif schedule.staleness == 1:
        _check_awake(
            config,
            "with schedule.staleness 1 on the same devices, where sampler and trainer are awake at once (or take "
            "schedule.placement split)",
        )
        if config.generation.tensor_parallel > 1:
            raise ConfigError(
                "generation.tensor_parallel above 1 does not go with schedule.staleness 1 on the same devices: "
                "leave it out, or take schedule.placement split"
            )


def _check_awake(config: Config, where: str) -> None:
    memory = config.memory
    for key, value, allowed in (
        ("memory.sleep", memory.sleep, ("auto", "none")),
        ("memory.offload", memory.offload, ("auto", "off")),
    ):
        if value not in allowed:
            raise ConfigError(f"{key} {value} does not go {where}: leave it out")


def _check_sampler(config: Config, world_size: int, device_type: str) -> None:
    generation = config.generation
    if generation.backend == "vllm" and generation.temperature < 0.01:
        raise ConfigError("generation.temperature below 0.01 is changed by vLLM: take generation.backend hf")
    if generation.backend != "vllm" and generation.tensor_parallel > 1:
        raise ConfigError(
            "generation.tensor_parallel joins ranks under one vLLM engine: leave it at 1, or take "
            "generation.backend vllm"
        )
    samplers = config.generating_ranks or world_size
    if samplers % generation.tensor_parallel:
        raise ConfigError(
            f"generation.tensor_parallel ({generation.tensor_parallel}) must divide the number of ranks "
            f"that generate ({samplers})"
        )
    if config.memory.explain and device_type == "cpu":
        raise ConfigError("memory.explain is about GPUs and there is none here: say which by memory.gpu_gib")


def missing(config: Config) -> list[str]:
    """One line for each setting that a run must have and this configuration has not."""
    data, lacks = config.data, []
    if data.label is None:
        lacks.append("data.path is missing: give prompts by exactly one of data.task and data.path (or data.mixture)")
    if data.task is None and config.model.path is None:
        lacks.append("model.path is missing: only an embedded task (data.task) has a starting model of its own")
    if data.task is None and not config.reward.sources and not config.trains_on_rows:
        lacks.append(
            "reward.function, reward.model or reward.url is missing: only an embedded task (data.task) has a "
            "verifier of its own"
        )
    return lacks


def _check_sources(config: Config) -> None:
    reward = config.reward
    if lacks := missing(config):
        raise ConfigError(lacks[0])
    data_checks.check(config)
    if unused := [name for name in reward.weights if name not in reward.sources]:
        raise ConfigError(f"reward.weights names '{unused[0]}', but reward.{unused[0]} is not given")
    if reward.url is not None and not reward.url.startswith(("http://", "https://")):
        raise ConfigError(f"reward.url '{reward.url}' must start with http:// or https://")
    if reward.function is not None:
        user_code.check("reward.function", reward.function, "function")
    for key, path in (
        ("model.path", config.model.path),
        ("model.value_path", config.model.value_path),
        ("model.reference_path", config.model.reference_path),
    ):
        if path is not None and path.startswith((".", "/")):
            _must_exist(key, path)
    if reward.model is not None:  # the others are looked at when their configurations are read, its tokenizer before
        model_folder.check_there("reward.model", reward.model)


def _check_batches(config: Config, world_size: int) -> None:
    rollout, train = config.rollout, config.train
    if config.trains_on_rows:
        if train.rows_per_step % world_size:
            raise ConfigError(
                f"train.rows_per_step ({train.rows_per_step}) must be a multiple of the number of ranks ({world_size})"
            )
        _check_microbatch(config, "data.max_row_tokens")
        return
    if rollout.prompts_per_step % world_size:
        raise ConfigError(
            f"rollout.prompts_per_step ({rollout.prompts_per_step}) must be a multiple of the number of ranks "
            f"({world_size})"
        )
    if config.episodes_per_step % (train.minibatches_per_batch * world_size):
        raise ConfigError(
            f"{config.episodes_per_step} episodes a step (rollout.prompts_per_step x samples_per_prompt) do not "
            f"split into {train.minibatches_per_batch} equal minibatches (train.minibatches_per_batch) on "
            f"{world_size} rank(s)"
        )
    _check_microbatch(config, "(rollout.max_prompt_tokens + rollout.max_response_tokens)")


def _check_microbatch(config: Config, sequence: str) -> None:
    """The longest sequence, made up as ``sequence`` says, or pair of such must fit a forward pass."""
    together = config.sequences_side_by_side
    longest = together * config.longest_sequence
    if config.train.tokens_per_microbatch < longest:
        raise ConfigError(
            f"train.tokens_per_microbatch ({config.train.tokens_per_microbatch}) must hold the longest "
            f"{'pair of sequences' if together > 1 else 'sequence'}: {'2 x ' * (together > 1)}{sequence} = {longest}"
        )


def _must_exist(key: str, path: str) -> None:
    if not os.path.exists(path):
        raise ConfigError(f"{key}: there is no '{path}'")
