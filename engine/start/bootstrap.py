"""The embedded task's starting checkpoints, cached: random weights, and what a short supervised phase makes of them."""

from __future__ import annotations

import contextlib
import dataclasses
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

from algorithms.sft import SFT
from engine.config import Config, Data
from engine.config.learning import Train
from engine.data.prompts import Prompt
from engine.data.training_rows import load_rows
from engine.generation.hf import HFGenerator
from engine.generation.sampling import Sampling
from engine.machine.world import World
from engine.rollouts import experience
from engine.rollouts.source import sample_responses
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


def starting_policy(config: Config, world: World, say: Callable[[str], None]) -> str:
    """The folder of the policy that a run of the embedded task starts from. Collective.

    Supervised fine-tuning starts from random weights, all else from what it has made of them.
    """
    if config.trains_on_rows and config.algorithm.rows == "single":
        return random_checkpoint(config, world)
    return starting_checkpoint(config, world, say)


def random_checkpoint(config: Config, world: World) -> str:
    """The folder of a policy of the task's shape with random weights for this seed, made on the first call. Collective.

    It is kept where ``starting_checkpoint`` keeps its own.
    """
    folder = _place(config, world, "random", ())
    if not world.broadcast((folder / "config.json").exists()):
        folder.parent.mkdir(parents=True, exist_ok=True)
        if world.main:
            made = Path(tempfile.mkdtemp(prefix="made-", dir=folder.parent))
            _write_random(config, made / "model")
            publish(made, folder)
        world.barrier()
    return str(folder)


def starting_checkpoint(config: Config, world: World, say: Callable[[str], None]) -> str:
    """The folder of the task's starting policy for this seed, made on the first call. Collective.

    It is kept under ``$TANDEM_CACHE`` (default ``~/.cache/tandem``).
    """
    recipe = (BATCH, LEARNING_RATE, WARMUP_STEPS, ADAM_BETAS, CHECK_EVERY, RISING_AT, STOP_AT)
    folder = _place(config, world, "addition", recipe)
    if not world.broadcast((folder / "config.json").exists()):
        say("No starting checkpoint yet: a short supervised phase makes one (once; it is cached)")
        _make(folder, config, world, say)
    return str(folder)


def _place(config: Config, world: World, name: str, recipe: tuple[object, ...]) -> Path:
    """The folder of a checkpoint that a recipe makes of the task's model, the same on all ranks. Collective."""
    shape = addition.model_config().to_json_string()
    key = hashlib.sha256(f"{recipe} {shape}".encode()).hexdigest()[:10]
    cache = Path(os.environ.get("TANDEM_CACHE", "~/.cache/tandem")).expanduser()
    return Path(world.broadcast(str(cache / f"{name}-{key}-seed{config.seed}")))


def _write_random(config: Config, folder: Path) -> None:
    """A policy of the task's shape, its weights drawn from the run's seed, and the task's tokenizer."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(config.seed)
    AutoModelForCausalLM.from_config(addition.model_config()).save_pretrained(folder)
    addition.tokenizer().save_pretrained(folder)


def publish(made: Path, folder: Path) -> None:
    """Gives ``made/model`` its place, unless another run has made the same checkpoint meanwhile."""
    with contextlib.suppress(FileExistsError):
        if not folder.exists():
            os.rename(made / "model", folder)
    shutil.rmtree(made)


def _make(folder: Path, config: Config, world: World, say: Callable[[str], None]) -> None:
    """Supervised fine-tuning on the task's worked problems, up to an accuracy that leaves much to learn."""
    started = time.perf_counter()
    settings = _supervised(config)
    tokenizer = addition.tokenizer()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(tempfile.TemporaryDirectory(dir=folder.parent)) if world.main else None
        scratch = world.broadcast(own)
        if world.main:
            _write_random(config, Path(scratch))
        world.barrier()
        trainer = Trainer(settings, world, policy=models.load_policy(scratch), reference=None, value=None)
        generator = HFGenerator(scratch, dtype=torch.float32, device=world.device, max_batch=512)
        world.barrier()
    rows, _, _ = load_rows(settings, tokenizer)
    order = random.Random(config.seed)
    stops = (int(tokenizer.eos_token_id),)
    accuracy = 0.0
    for step in range(1, MAX_STEPS + 1):
        units = order.sample(rows, BATCH)[world.rank :: world.size]
        samples = [dataclasses.replace(one, index=i, group_id=i) for i, unit in enumerate(units) for one in unit]
        rollout = experience.rollout(samples, None, None, None, None)
        objective = experience.objective(settings, rollout, 0.0, world, step)
        trainer.update(samples, {}, objective, step=step, version=0)
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
        publish(made, folder)
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


def _supervised(config: Config) -> Config:
    """The supervised phase's own settings, with the run's seed and kernels."""
    train = Train(
        steps=MAX_STEPS,
        rows_per_step=BATCH,
        learning_rate=LEARNING_RATE,
        warmup_steps=WARMUP_STEPS,
        adam_betas=ADAM_BETAS,
        tokens_per_microbatch=BATCH * 16,
        workspace_gib=config.train.workspace_gib,
        kernel_backend=config.train.kernel_backend,
    )
    return Config(algo=SFT.name, seed=config.seed, data=Data(task="addition"), train=train)
