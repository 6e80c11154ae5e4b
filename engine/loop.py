"""The loop: generate, score, log-probabilities, update, hand over, evaluate, save. Every algorithm runs through it."""

from __future__ import annotations

import dataclasses
import functools

import torch
from transformers.utils import logging as transformers_logging

from engine.config import Config
from engine.config.numerics import old_source
from engine.machine import devices
from engine.machine.world import World, joined
from engine.rollouts import experience
from engine.schedules import split
from engine.session import Session
from engine.start import build
from engine.start.preflight import Inputs


def run(config: Config, inputs: Inputs, config_file: str | None) -> None:
    """Joins the ranks; this one trains, or in a split run generates for those that do."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.manual_seed(config.seed)
    generators = config.generating_ranks
    with joined(devices.device_type(config), config.launch.timeout_minutes, generators) as world:
        if world.generates:
            split.generate(config, world, functools.partial(build.sampler, inputs))
        else:
            train(config, inputs, config_file, world)


def train(config: Config, inputs: Inputs, config_file: str | None, world: World) -> None:
    """Trains to ``train.steps``, from the start or from the newest checkpoint of ``config.resume``."""
    with Session.open(config, inputs, config_file, world) as run:
        if run.state.step == 0:
            run.evaluate()

        while run.state.step < config.train.steps:
            run.stop_if_asked()
            samples = run.sample()
            run.rest()
            with run.phase("reward"):
                samples = run.score(samples)
            behaviour = None if config.trains_on_rows else experience.behaviour_logprobs(samples)
            old = behaviour if old_source(config) == "sampler" else None
            with run.phase("old"):
                if old_source(config) == "pass":
                    old = run.trainer.logprobs(run.trainer.policy, samples)
            with run.phase("ref"):
                ref = run.reference_logprobs(samples)
            with run.phase("value"):
                values, end_values = run.trainer.values(samples) if run.trainer.value else (None, None)

            rollout = experience.rollout(samples, old, ref, values, end_values)
            objective = experience.objective(config, rollout, run.state.kl_coef, run.world, run.state.step)
            with run.phase("train"):
                tokens = {"old_logprobs": old, "sampler_logprobs": behaviour, "ref_logprobs": ref, "old_values": values}
                update = run.trainer.update(
                    samples,
                    {name: vector for name, vector in tokens.items() if vector is not None},
                    objective,
                    step=run.state.step,
                    version=run.state.version,
                    train_policy=run.state.step >= config.value_warmup_steps,
                )
            run.state.version += 1
            run.hand_over()

            if old is None:
                rollout = dataclasses.replace(rollout, old_logprobs=update.old_logprobs)
            run.finish_step(samples, rollout, objective.metrics | update.metrics)
            run.stop_if_asked()
            run.evaluate()
            run.save()
        run.finish()
