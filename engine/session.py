"""Everything a run holds while it trains, and the loop's verbs on it."""

from __future__ import annotations

import contextlib
import gc
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from algorithms import kl_control
from algorithms.base import Rollout, global_mean
from engine import (
    bootstrap,
    build,
    cli,
    data,
    distributed,
    experience,
    folder,
    launch,
    rewards,
    rollout,
    state,
    weights,
)
from engine.config import Config, ConfigError
from engine.device_memory import Meter
from engine.distributed import World
from engine.generation.base import Generator, Sampling
from engine.report.closing import closing_lines
from engine.report.recorder import Recorder
from engine.sample import Sample
from engine.summary import summary
from engine.training.trainer import Trainer


class Session:
    """A run in progress on one rank. Methods are collective unless they say otherwise."""

    def __init__(self, config: Config, world: World, run_dir: Path, recorder: Recorder | None) -> None:
        self.config, self.world, self.run_dir, self._recorder = config, world, run_dir, recorder
        self._phases: dict[str, float] = defaultdict(float)
        self.say(config.arithmetic(world.size))

        self.reward_function = rewards.load(config)
        plan = build.memory_plan(config, world)
        if plan.phases or config.generation.backend == "vllm":
            self.say(plan.table())
        path = config.model.path or bootstrap.starting_checkpoint(config, world, self.say)
        self.tokenizer = data.load_tokenizer(path)
        prompts, self._held_out, notes = data.load(config, self.tokenizer)
        for note in notes:
            self.say(note)
        self._prompts = data.PromptStream(prompts, config.seed, config.data.shuffle)
        self._stops = rollout.stop_token_ids(self.tokenizer, config.generation.stop_tokens)
        vocabulary = AutoConfig.from_pretrained(path).vocab_size
        if any(max(prompt.ids) >= vocabulary for prompt in [*prompts, *self._held_out]):
            raise ConfigError(f"{config.data.path}: a prompt has token ids beyond the model's {vocabulary} tokens")
        self._turns = build.colocation(config, path, world, plan, prompts, self.say)
        self._meter = Meter(world.device)

        self.state = state.OnlineTrainerState(kl_coef=config.kl.coef, world_size=world.size)
        if config.resume and (checkpoint := state.newest(run_dir)):
            self._turns.rest()
            self._turns.take_back()
            self.state = state.load(checkpoint, self.trainer, world)
            if (
                cli.load_run(run_dir).kl != config.kl
            ):  # new settings: what the controller had reached is of the old ones
                self.state.kl_coef = config.kl.coef
            self._turns.make_room()
            self._turns.hand_over(self.state.version)
            self.say(f"Resumed from {checkpoint}")
        self._prompts.cursor = self.state.cursor
        self._metric: float | None = None
        self._clock = self._step_started = time.perf_counter()

    @classmethod
    @contextlib.contextmanager
    def open(cls, config: Config, config_file: str | None) -> Iterator[Session]:
        """Joins the ranks and builds the run; on the way out the report is written, also for a crash."""
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        torch.manual_seed(config.seed)
        with distributed.joined(launch.device_type(config), config.launch.timeout_minutes) as world:
            run_dir = Path(world.broadcast(str(folder.locate(config, config_file)) if world.main else None))
            with folder.recording(config, world, run_dir) as recorder:
                session = cls(config, world, run_dir, recorder)
                if world.main:
                    folder.write_config(config, run_dir)
                gc.collect()
                gc.freeze()  # vLLM collects garbage before it sleeps: what stays anyway would take most of that time
                try:
                    yield session
                finally:
                    gc.unfreeze()
                session.generator.close()

    @property
    def trainer(self) -> Trainer:
        """The trained models."""
        return self._turns.trainer

    @property
    def generator(self) -> Generator:
        """The sampler."""
        return self._turns.generator

    def say(self, text: str) -> None:
        """Tells the person something; on rank 0."""
        if self._recorder:
            self._recorder.message(text)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a part of the step and shows it as the one in progress. Not collective."""
        started = time.perf_counter()
        with self._recorder.phase(name) if self._recorder else contextlib.nullcontext():
            yield
            if self.world.device.type == "cuda":
                torch.cuda.synchronize()
        self._phases[name] += time.perf_counter() - started

    def sample(self) -> list[Sample]:
        """Takes the step's prompts from the stream and samples this rank's share of the responses."""
        config, world = self.config, self.world
        self._step_started = time.perf_counter()
        self._meter.start()
        batch = self._prompts.take(config.rollout.prompts_per_step)
        share = len(batch) // world.size
        samples = rollout.sample(
            batch[world.rank * share : (world.rank + 1) * share],
            self.generator,
            self.tokenizer,
            self._sampling(config.generation.temperature),
            samples_per_prompt=config.rollout.samples_per_prompt,
            first_group=world.rank * share,
            seed=config.seed,
            step=self.state.step,
        )
        self._meter.stop("generate")
        return samples

    def rest(self) -> None:
        """Gives the sampler's turn to the trainer."""
        with self.phase("sleep"):
            self._turns.rest()
        if self._turns.plan.sleep != "none":
            self._meter.asleep()
        if self._turns.plan.offload:
            with self.phase("offload"):
                self._turns.take_back()
        self._meter.start()

    def hand_over(self) -> None:
        """Gives the turn, and the trainer's current weights, to the sampler."""
        self._meter.stop("train")
        if self._turns.plan.offload:
            with self.phase("offload"):
                self._turns.make_room()
        with self.phase("sync"):
            self._turns.hand_over(self.state.version)

    def finish_step(self, samples: list[Sample], batch: Rollout, metrics: dict[str, float]) -> None:
        """Advances the state and records the step."""
        config, world, current = self.config, self.world, self.state
        seconds = time.perf_counter() - self._step_started
        tokens = int(world.sum(torch.tensor(sum(sample.length for sample in samples))))
        metrics = experience.metrics(samples, batch, world, config.has_verifier) | metrics
        if config.kl.coef:
            metrics["kl/coef"] = current.kl_coef
        if config.kl.target is not None:
            current.kl_coef = kl_control.adapted(
                current.kl_coef, metrics["kl/ref_mean"], config.kl.target, config.kl.horizon, config.episodes_per_step
            )
        current.step += 1
        current.episode += config.episodes_per_step
        current.cursor = self._prompts.cursor
        current.seconds += self._lap()
        current.tokens += tokens
        metrics |= {
            "progress/episode": current.episode,
            "progress/epoch": self._prompts.epoch,
            "tokens_per_second": tokens / seconds,
            **self._meter.metrics(self._turns.plan, world),
            "time/step": seconds,
            **{f"time/{name}": spent for name, spent in self._phases.items()},
        }
        self._phases.clear()
        if self._recorder:
            self._recorder.step(current.step, metrics)
            self._recorder.samples(current.step, [_row(one) for one in samples[: config.save.samples_per_step]])

    def evaluate(self) -> None:
        """Greedy responses to the held-out prompts, if it is time."""
        config, current, every = self.config, self.state, self.config.eval.every_steps
        due = current.step in (0, config.train.steps) or (every and current.step % every == 0)
        if not self._held_out or not due:
            return
        with self.phase("eval"):
            mine = self._held_out[self.world.rank :: self.world.size]
            samples = rollout.sample(
                mine,
                self.generator,
                self.tokenizer,
                self._sampling(0.0),
                samples_per_prompt=1,
                first_group=0,
                seed=0,
                step=0,
            )
            rewards.score(samples, self.reward_function, config)
        raw = torch.tensor([sample.reward_parts["score"] for sample in samples])
        self._metric = global_mean(raw, self.world.sum)
        if current.step == 0:
            current.metric_before = self._metric
        current.best_metric = max(
            self._metric, current.best_metric if current.best_metric is not None else self._metric
        )
        if self._recorder:
            name = "eval/accuracy" if config.has_verifier else "eval/reward"
            self._recorder.evaluation(current.step, {name: self._metric})

    def save(self) -> None:
        """Writes a checkpoint, if it is time."""
        every, step = self.config.save.every_steps, self.state.step
        if step == self.config.train.steps or (every and step % every == 0):
            with self.phase("save"):
                if self._turns.plan.offload:
                    self._turns.rest()
                    self._turns.take_back()
                state.save(self.run_dir, self.state, self.trainer, self.world, self.config.save.keep)
                if self._turns.plan.offload:
                    self._turns.make_room()
                    self._turns.hand_over(self.state.version)

    def finish(self) -> None:
        """Exports the policy, closes the report, says what was learned."""
        config = self.config
        if self._metric is None:  # resumed after the last step
            self.evaluate()
        model_dir = self.run_dir / "model"
        with self.phase("save"):
            weights.export(self.trainer.policy, str(model_dir), write=self.world.main)
        self.state.seconds += self._lap()
        peak = self.world.max(self._meter.peak_gib)
        if not self._recorder:
            return
        self.tokenizer.save_pretrained(model_dir)
        result = summary(config, self.state, self._metric, peak)
        self._recorder.close(result)
        go_on = [
            f"python -m engine.run --resume {self.run_dir} --train.steps {2 * config.train.steps}   # train longer",
            f"tensorboard --logdir {self.run_dir.parent}",
            f"AutoModelForCausalLM.from_pretrained('{model_dir}')   # the trained policy",
        ]
        self._recorder.say_last(closing_lines(result, self.run_dir, go_on))

    def _lap(self) -> float:
        """Seconds since the last call, or since training began."""
        last, self._clock = self._clock, time.perf_counter()
        return self._clock - last

    def _sampling(self, temperature: float) -> Sampling:
        return Sampling(self.config.rollout.max_response_tokens, temperature, self._stops)


def _row(sample: Sample) -> dict[str, object]:
    return {
        "prompt": sample.prompt_text,
        "response": sample.response_text,
        "reward": sample.reward,
        "finish_reason": sample.finish_reason,
        "policy_version": sample.policy_version,
        **sample.reward_parts,
    }
