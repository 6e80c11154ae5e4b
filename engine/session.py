"""Everything a run holds while it trains, and the loop's verbs on it."""

from __future__ import annotations

import contextlib
import gc
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch

from algorithms import kl_control
from algorithms.rollout import Rollout
from engine import rewards
from engine.config import Config, cli
from engine.launch import signals
from engine.machine.world import World
from engine.memory import meter
from engine.report import records
from engine.report.closing import closing_lines, what_next
from engine.report.recorder import Recorder
from engine.rewards import RewardError
from engine.rollouts import experience, off_policy, sample_records
from engine.run_folder import checkpoints, folder, in_flight
from engine.run_folder.summary import summary
from engine.sample import Sample
from engine.schedules import split
from engine.start import build
from engine.start.loaded import Loaded
from engine.start.preflight import Inputs
from engine.training import export, held_out, learning_rate
from engine.training.trainer import Trainer


class Session:
    """A run in progress on one rank. Methods are collective unless they say otherwise."""

    def __init__(
        self,
        config: Config,
        inputs: Inputs,
        loaded: Loaded,
        world: World,
        run_dir: Path,
        recorder: Recorder | None,
    ) -> None:
        self.config, self.world, self.run_dir, self._recorder = config, world, run_dir, recorder
        self._phases: dict[str, float] = defaultdict(float)
        self.say(config.arithmetic(world.size))
        if loaded.plans["train"].phases or config.generation.backend == "vllm":
            self.say("\n".join(dict.fromkeys(one.table() for one in loaded.plans.values())))  # one without a GPU
        for note in inputs.notes:
            self.say(note)
        if world.main and (room := folder.room_note(config, loaded.path, run_dir)):
            self.say(room)
        if world.link:
            for rank in range(config.generating_ranks):
                world.link.send(f"start-{rank}", split.Start(str(run_dir), loaded.path))
        self.scorer, self._path, self._tokenizer = loaded.scorer, loaded.path, inputs.tokenizer
        self._held_out = inputs.has_held_out
        self._source = build.source(config, inputs, world)
        self._turns = build.turns(
            config, loaded.path, loaded.models, inputs, world, loaded.plans, self._source, self.say
        )
        if world.device.type == "cuda":
            meter.use_growing_segments()
        self._meter = meter.Meter(world.device)

        ranks = world.size + config.generating_ranks
        self.state = checkpoints.OnlineTrainerState(
            kl_coef=config.kl.coef, world_size=ranks, base_models=loaded.models.digests
        )
        if config.resume and (checkpoint := checkpoints.newest(run_dir)):
            self._turns.rest()
            self._turns.take_back()
            self.state = checkpoints.load(checkpoint, self.trainer, world)
            if jump := learning_rate.jump(self.trainer.apply_settings(), self.state.learning_rates):
                self.note(jump)
            # Rank 0 writes the folder's configuration anew later on, perhaps before another rank has read it.
            if world.broadcast(cli.load_run(run_dir).kl != config.kl if world.main else None):
                # New settings: what the controller had reached is of the old ones.
                self.state.kl_coef = config.kl.coef
            waiting = in_flight.read(checkpoint, world, self._source)
            self._turns.make_room()
            self._turns.hand_over(self.state.version)
            self._turns.resume(waiting, self.state.step, self.state.cursor)
            self.say("\n".join([*checkpoints.torn(run_dir), f"Resumed from {checkpoint}"]))
        self._cursor = self.state.cursor
        self._sampled: list[Sample] = []
        self._evaluated = False
        self._held_out_metrics: dict[str, float] = {}  # of the last evaluation
        self._clock = self._step_started = time.perf_counter()

    @classmethod
    @contextlib.contextmanager
    def open(cls, config: Config, inputs: Inputs, config_file: str | None, world: World) -> Iterator[Session]:
        """Builds the run on the training ranks; on the way out the report is written, also for a crash.

        The run's folder comes to be when everything that can be wrong with its inputs has been looked at.
        """
        loaded = Loaded.of(config, inputs, world)
        run_dir = folder.take(config, config_file, world)
        with folder.recording(config, world, run_dir) as recorder:
            session = cls(config, inputs, loaded, world, run_dir, recorder)
            if world.main:
                folder.write_config(config, run_dir)
            gc.collect()
            gc.freeze()  # vLLM collects garbage before it sleeps: what stays anyway would take most of that time
            try:
                yield session
            finally:
                gc.unfreeze()
            session._turns.close()

    @property
    def trainer(self) -> Trainer:
        """The trained models."""
        return self._turns.trainer

    def say(self, text: str) -> None:
        """Tells the person something; on rank 0."""
        if self._recorder:
            self._recorder.message(text)

    def note(self, text: str) -> None:
        """The same for what the report must tell as well."""
        if self._recorder:
            self._recorder.note(self.state.step + 1, text)

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
        """This rank's share of the step's rollout batch: sampled now, or waited for where the sampler runs ahead."""
        self._step_started = time.perf_counter()
        self._meter.start()
        with self.phase(self._turns.phase):
            batch = self._turns.sample(self.state.step)
        if "generate" in self._turns.plan.phases:  # else it happens while training, or elsewhere
            self._meter.stop("generate")
        self._cursor = batch.cursor
        return batch.samples

    def score(self, samples: list[Sample]) -> list[Sample]:
        """Gives the samples their rewards; those that can be trained on. Rows are given, and have theirs.

        Raises:
            RewardError: a source failed, or too many rollout batches in a row have nothing to train on.
        """
        self._sampled, self._given = samples, {}
        if self.scorer is None:
            return samples
        self.scorer.score(samples)
        self._given = rewards.means(samples, self.config, self.world.sum)
        kept = experience.usable(samples, self.config)
        if self.world.max(len(kept)):
            self.state.skipped = 0
        else:
            self._skip()
            self._given = {}  # a source that gave nothing has no mean
        return kept

    def _skip(self) -> None:
        """Counts a rollout batch without a response to train on, and says so.

        Raises:
            RewardError: there have been more of them in a row than ``rollout.max_skipped_batches``.
        """
        allowed = self.config.rollout.max_skipped_batches
        self.state.skipped += 1
        what = experience.why_unusable(self._sampled, self.config, self.world)
        if self.state.skipped > allowed:
            raise RewardError(
                f"step {self.state.step + 1}: nothing to train on, for {self.state.skipped} rollout batches in a row "
                f"({what}), and rollout.max_skipped_batches allows {allowed}: see in {records.SAMPLES} which responses "
                "the reward gives no score"
            )
        self.say(
            f"Step {self.state.step + 1} trains on nothing: {what} "
            f"({self.state.skipped} in a row, of {allowed} by rollout.max_skipped_batches)"
        )

    def reference_logprobs(self, samples: list[Sample]) -> torch.Tensor | None:
        """[T] log-probabilities of the samples by the frozen reference, in nats; None if the run has none."""
        return self._turns.reference_logprobs(samples)

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
        if config.trains_on_rows:
            metrics = experience.row_metrics(samples, metrics, world)
        else:
            metrics = experience.metrics(samples, batch, world, config.has_verifier) | self._given | metrics
            metrics["reward/dropped_fraction"] = experience.dropped_fraction(samples, self._sampled, world)
            behaviour = experience.behaviour_logprobs(samples)
            assert batch.old_logprobs is not None
            metrics |= off_policy.metrics(config, samples, batch.old_logprobs, behaviour, current.version - 1, world)
        if config.kl.coef and config.algorithm.kl:
            metrics["kl/coef"] = current.kl_coef
        if config.kl.target is not None and "kl/ref_mean" in metrics:
            current.kl_coef = kl_control.adapted(
                current.kl_coef, metrics["kl/ref_mean"], config.kl.target, config.kl.horizon, config.episodes_per_step
            )
        current.step += 1
        current.episode += config.episodes_per_step
        current.cursor = self._cursor
        current.seconds += self._lap()
        current.tokens += tokens
        current.learning_rates |= self.trainer.last_rates
        metrics |= {
            "progress/episode": current.episode,
            "progress/epoch": self._source.epochs(current.cursor),
            "tokens_per_second": tokens / seconds,
            **self._meter.metrics(self._turns.plan, world),
            **self._turns.metrics(seconds, self._phases.get("wait", 0.0)),
            "time/step": seconds,
            **{f"time/{name}": spent for name, spent in self._phases.items()},
        }
        self._phases.clear()
        shown = sample_records.of_step(samples, self._sampled, self._tokenizer, config, world)
        if self._recorder:
            self._recorder.step(current.step, metrics)
            self._recorder.samples(current.step, shown)

    def evaluate(self) -> None:
        """Held-out responses, or the loss on held-out rows, if it is time; the best policy so far is kept."""
        config, current, every = self.config, self.state, self.config.eval.every_steps
        due = current.step in (0, config.train.steps) or (every and current.step % every == 0)
        if not self._held_out or not due:
            return
        with self.phase("eval"):
            metrics = self._measured(self._turns.held_out())
        self._evaluated, self._held_out_metrics = True, metrics
        if (metric := metrics.get(config.eval_metric)) is None:
            self.say(f"No score after step {current.step}: every response to the held-out prompts was dropped")
            return
        if current.step == 0:
            current.metric_before = metric
        if self._recorder:
            self._recorder.evaluation(current.step, metrics)
        if config.is_better(metric, current.best_metric):
            current.best_metric = metric
            if config.save.best and current.step:
                with self.phase("save"):
                    self._export("best")

    def _measured(self, samples: list[Sample]) -> dict[str, float]:
        """The metrics of an evaluation, from this rank's share of the held-out samples; responses are recorded."""
        if self.scorer is not None:
            self.scorer.score(samples)
            shown = sample_records.of_evaluation(samples, self._tokenizer, self.config, self.world)
            if self._recorder:
                self._recorder.samples(self.state.step, shown)
            return experience.held_out_metrics(samples, self.config, self.world)
        rollout = experience.rollout(samples, None, self.reference_logprobs(samples), None, None)
        objective = experience.objective(self.config, rollout, 0.0, self.world, self.state.step)
        return held_out.measure(self.trainer, samples, rollout.ref_logprobs, objective)

    def save(self) -> None:
        """Writes the policy to ``models/`` and a checkpoint, each if it is time."""
        every, step = self.config.save.every_steps, self.state.step
        if (often := self.config.save.hf_every_steps) and step % often == 0:
            with self.phase("save"):
                self._export(f"{folder.MODELS}/step-{step:06d}")
        if step == self.config.train.steps or (every and step % every == 0):
            self._checkpoint()
            if self._turns.plan.offload:
                with self.phase("save"):
                    self._turns.make_room()
                    self._turns.hand_over(self.state.version)

    def _checkpoint(self, wait: bool = True) -> None:
        """Writes one; the optimizer states are then where training has them. ``wait`` as for ``Schedule.in_flight``."""
        with self.phase("save"):
            if self._turns.plan.offload:
                self._turns.rest()
                self._turns.take_back()
            waiting, keep = self._turns.in_flight(wait), self.config.save.keep
            checkpoints.save(self.run_dir, self.state, self.trainer, waiting, self.world, keep)

    def stop_if_asked(self) -> None:
        """Ends the run with a checkpoint if a signal came on any rank that something there has swallowed."""
        number = int(self.world.max(signals.stop_requested()))
        if not number:
            return
        if self.state.step:
            # Ranks that only generate may have ended by the same signal: their batch is not waited for.
            self._checkpoint(wait=False)
        raise signals.stopped(number)

    def finish(self) -> None:
        """Exports the policy, closes the report, says what was learned."""
        config = self.config
        if not self._evaluated:  # resumed after the last step
            self.evaluate()
        with self.phase("save"):
            model_dir = self._export("model")
        self.state.seconds += self._lap()
        peak = self.world.max(self._meter.peak_gib)
        if not self._recorder:
            return
        result = summary(config, self.state, self._held_out_metrics, peak)
        self._recorder.close(result)
        go_on = what_next(self.run_dir, model_dir, config.train.steps, config.trained)
        self._recorder.say_last(closing_lines(result, self.run_dir, go_on))

    def _lap(self) -> float:
        """Seconds since the last call, or since training began."""
        last, self._clock = self._clock, time.perf_counter()
        return self._clock - last

    def _export(self, name: str) -> Path:
        """The policy as a Hugging Face folder of the run, in place of an older one of that name. Collective."""
        final = self.run_dir / name
        export.export(self.trainer.policy, self._tokenizer, self._path, final, self.world)
        return final
