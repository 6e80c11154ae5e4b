"""What no setting of a command tells alone, before anything heavy is imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from engine.config import Config, ConfigError, cli, user_code
from engine.config.inputs import Reward
from engine.data import checks as data_checks
from engine.evaluation.places import Place
from engine.evaluation.settings import Evaluate, Generate, Relabel
from engine.models import model_folder


def check_writes(models: Sequence[Place]) -> None:
    """Raises ConfigError for a model of a run that trained one which writes nothing. Reads the runs' settings alone."""
    for run_dir in {place.run_dir: None for place in models if place.run_dir is not None}:
        if cli.load_run(run_dir).trained == "reward_model":
            raise ConfigError(f"what {run_dir} trained is a reward model: it writes nothing")


def check_scores(place: Place) -> None:
    """Raises ConfigError likewise for a model of a run that trained a policy, which gives no score."""
    if place.run_dir is not None and cli.load_run(place.run_dir).trained != "reward_model":
        raise ConfigError(f"what {place.run_dir} trained is a policy: it gives no score")


def check_sampled(given: Generate | Evaluate, config: Config) -> None:
    """Checks prompts and sampler.

    Raises:
        ConfigError: with one line for the first thing that is wrong and what to do about it.
    """
    data, sampler = given.data, given.generation
    if data.label is None:
        raise ConfigError(
            "data.path is missing: give prompts by exactly one of data.task and data.path (or data.mixture)"
        )
    data_checks.check(config)
    if given.prompts == "held_out" and not data.has_held_out:
        raise ConfigError(
            "prompts held_out: there are none, give them by data.eval_path, data.eval_split or data.eval_fraction"
        )
    if sampler.backend == "vllm":
        if 0 < sampler.temperature < 0.01:
            raise ConfigError(
                "generation.temperature between 0 and 0.01 is changed by vLLM: take 0, or generation.backend hf"
            )
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError("the package vllm is missing, generation.backend vllm needs it: run make setup")
    if sampler.temperature == 0 and given.rollout.samples_per_prompt > 1:
        raise ConfigError(
            "rollout.samples_per_prompt above 1 needs a generation.temperature above 0: greedy responses are all the "
            "same"
        )
    if "" in sampler.stop_strings:
        raise ConfigError("generation.stop_strings has an empty text, which would end every response at once")


def check_judge(given: Evaluate) -> None:
    """Checks what judges the responses, and what they are compared with; raises ConfigError likewise."""
    reward, pairwise, baseline = given.reward, given.judge.pairwise, given.baseline
    if pairwise is not None and reward.sources:
        raise ConfigError(
            f"give one of judge.pairwise and reward.{reward.sources[0]}: two judges would answer two questions"
        )
    if pairwise is not None:
        user_code.check("judge.pairwise", pairwise, "function")
    elif not reward.sources and given.data.task is None:
        raise ConfigError(
            "nothing judges the responses: give reward.function, reward.model, reward.url or judge.pairwise"
        )
    _check_reward(reward)
    if baseline.column is not None and baseline.model is not None:
        raise ConfigError("give one of baseline.column and baseline.model")


def check_relabelled(given: Relabel, config: Config) -> None:
    """Checks the pairs and what judges them; raises ConfigError likewise."""
    if given.data.task is None and given.data.path is None:
        raise ConfigError("data.path is missing: give pairs, or responses, by exactly one of data.task and data.path")
    data_checks.check(config)
    if not given.reward.sources:
        raise ConfigError("nothing judges the pairs: give reward.function, reward.model or reward.url")
    _check_reward(given.reward)
    if given.model.path is not None:
        model_folder.check_there("model.path", given.model.path)
    if given.model.path is None and given.reward.model is None and given.data.task is None:
        raise ConfigError(
            f"model.path is missing: reward.{given.reward.sources[0]} is given what a model reads, so name the model "
            "whose tokenizer and chat template write prompts and answers out"
        )


def _check_reward(reward: Reward) -> None:
    if reward.model is not None:
        model_folder.check_there("reward.model", reward.model)
    if reward.function is not None:
        user_code.check("reward.function", reward.function, "function")
    if unused := [name for name in reward.weights if name not in reward.sources]:
        raise ConfigError(f"reward.weights names '{unused[0]}', but reward.{unused[0]} is not given")
