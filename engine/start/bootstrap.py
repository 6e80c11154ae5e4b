"""The embedded task's starting checkpoint: a short supervised phase through the run's own trainer, cached."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from algorithms.base import Algorithm, Run
from algorithms.rollout import Objective, Rollout, every_response, likelihood
from engine.config import Config
from engine.config.learning import Train
from engine.config.schema import config_with
from engine.data.prompts import Prompt
from engine.generation.hf import HFGenerator
from engine.generation.sampling import Sampling
from engine.machine.world import World
from engine.rollouts import experience
from engine.rollouts.source import sample_responses
from engine.sample import Sample
from engine.tasks import addition
from engine.training import export, models, weights
from engine.training.trainer import Trainer

BATCH = 128
LEARNING_RATE = 2e-3
WARMUP_STEPS = 20
ADAM_BETAS = (0.9, 0.99)
CHECK_EVERY = 10
STOP_AT = 0.36
"""Held-out accuracy at which the phase ends: enough right answers to learn from, and much left to learn."""
RISING_AT = 0.12
"""From this accuracy on it rises fast, and is checked at every second step so as not to overshoot."""
MAX_STEPS = 1000


def starting_checkpoint(config: Config, world: World, say: Callable[[str], None]) -> str:
    """The folder of the task's starting policy for this seed, made on the first call. Collective.

    It is kept under ``$TANDEM_CACHE`` (default ``~/.cache/tandem``).
    """
    recipe = (BATCH, LEARNING_RATE, WARMUP_STEPS, ADAM_BETAS, CHECK_EVERY, RISING_AT, STOP_AT)
    shape = addition.model_config().to_json_string()
    key = hashlib.sha256(f"{recipe} {shape}".encode()).hexdigest()[:10]
    cache = Path(os.environ.get("TANDEM_CACHE", "~/.cache/tandem")).expanduser()
    folder = Path(world.broadcast(str(cache / f"addition-{key}-seed{config.seed}")))
    if not world.broadcast((folder / "config.json").exists()):
        say("No starting checkpoint yet: a short supervised phase makes one (once; it is cached)")
        _make(folder, config, world, say)
    return str(folder)


def _make(folder: Path, config: Config, world: World, say: Callable[[str], None]) -> None:
    started = time.perf_counter()
    tokenizer = addition.tokenizer()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(tempfile.TemporaryDirectory(dir=folder.parent)) if world.main else None
        scratch = world.broadcast(own)
        torch.manual_seed(config.seed)
        from transformers import AutoModelForCausalLM

        AutoModelForCausalLM.from_config(addition.model_config()).save_pretrained(scratch)  # rank 0 alone writes
        world.barrier()
        trainer = Trainer(_supervised(config), world, policy=models.load_policy(scratch), reference=None, value=None)
        generator = HFGenerator(scratch, dtype=torch.float32, device=world.device, max_batch=512)
        world.barrier()
    examples = addition.problems("train")
    stops = (int(tokenizer.eos_token_id),)
    order = random.Random(config.seed)
    accuracy = 0.0
    for step in range(1, MAX_STEPS + 1):
        rows = order.sample(examples, BATCH)[world.rank :: world.size]
        batch = [
            Sample(
                index=i,
                group_id=i,
                prompt_ids=tokenizer.encode(row["prompt"]),
                response_ids=[*tokenizer.encode(row["answer"], add_special_tokens=False), *stops],
            )
            for i, row in enumerate(rows)
        ]
        rollout = experience.rollout(batch, None, None, None, None)
        objective = experience.objective(trainer.config, rollout, 0.0, world, step)
        trainer.update(batch, {}, objective, step=step, version=0)
        if step % (CHECK_EVERY if accuracy < RISING_AT else 2) == 0:
            accuracy = _accuracy(trainer, generator, tokenizer, stops, step)
            if step % (5 * CHECK_EVERY) == 0 or accuracy >= STOP_AT:
                seconds = time.perf_counter() - started
                say(f"  supervised step {step}: {accuracy:.0%} of held-out problems right, {seconds:.0f} s")
            if accuracy >= STOP_AT:
                break
    else:
        raise RuntimeError(
            f"the supervised phase reached only {accuracy:.0%} of held-out problems in {MAX_STEPS} steps"
        )
    made = Path(world.broadcast(tempfile.mkdtemp(prefix="made-", dir=folder.parent) if world.main else None))
    export.export(trainer.policy, tokenizer, str(made), made / "model", world)
    if world.main:
        if not folder.exists():  # else another run made the same checkpoint meanwhile
            os.rename(made / "model", folder)
        shutil.rmtree(made)
    world.barrier()


def _accuracy(trainer: Trainer, generator: HFGenerator, tokenizer: Any, stops: tuple[int, ...], step: int) -> float:
    """Greedy accuracy on the first 512 held-out problems; every rank computes the same."""
    generator.renew(weights.full_weights(trainer.policy), step)
    problems = addition.problems("held_out")[:512]
    prompts = [Prompt(tokenizer.encode(row["prompt"]), row["prompt"], row) for row in problems]
    sampling = Sampling(addition.MAX_RESPONSE_TOKENS, 0.0, stops)
    samples = sample_responses(
        prompts,
        generator,
        tokenizer,
        sampling,
        samples_per_prompt=1,
        first_group=0,
        seed=0,
        step=0,
    )
    right = addition.verify([s.response_text for s in samples], [row["answer"] for row in problems])
    return sum(right) / len(right)


class Supervised(Algorithm):
    """Maximum likelihood of given answers; no sampler, value model or old policy has part in it."""

    name = "supervised"
    batches = "rows"

    def objective(self, rollout: Rollout, settings: None, run: Run) -> Objective:
        return likelihood(every_response(rollout), {})


def _supervised(config: Config) -> Config:
    """The supervised phase's own settings, with the run's seed and kernels."""
    train = Train(
        steps=MAX_STEPS,
        learning_rate=LEARNING_RATE,
        warmup_steps=WARMUP_STEPS,
        adam_betas=ADAM_BETAS,
        tokens_per_microbatch=BATCH * 16,
        workspace_gib=config.train.workspace_gib,
        kernel_backend=config.train.kernel_backend,
    )
    return config_with(Supervised.name, Supervised())(algo=Supervised.name, seed=config.seed, train=train)
