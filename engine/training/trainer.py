"""Forward passes and updates of the policy, the value model and the frozen reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from algorithms.rollout import Objective
from engine.config import Config
from engine.config.numerics import old_source
from engine.generation.equal_weights import Gap
from engine.machine.world import World
from engine.sample import Sample
from engine.training import learning_rate, liger, lora, models, residual, zero
from engine.training.averages import Averages
from engine.training.backward import policy_pass, score_pass, value_pass
from engine.training.minibatch import minibatches
from engine.training.offload import HostStates
from engine.training.packing import Microbatch, microbatches
from engine.training.token_store import TokenStore


class Update(NamedTuple):
    """What an update gives."""

    metrics: dict[str, float]
    """Over all ranks."""
    old_logprobs: Tensor | None
    """[T] fp32, nats, of this rank's samples from before the only optimizer step, where the update was not given any.
    """


class Trainer:
    """The trained models under DeepSpeed and what can be asked of them. Every method is collective.

    Where the algorithm trains a reward model, that stands in the policy's place.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        *,
        policy: models.Policy | models.RewardModel,
        reference: models.Policy | None,
        value: models.Value | None,
    ) -> None:
        self.config, self.world = config, world
        networks: list[models.Policy | models.RewardModel | models.Value | None] = [policy, reference, value]
        for network in networks:
            if network is not None and world.device.type == "cuda" and liger.patch(network.model):
                residual.patch(network.model)
        steps, value_settings = config.optimizer_steps, config.value_settings
        self.last_rates: dict[str, float] = {}
        """Learning rate of each model's last planned optimizer step."""
        self._rates: dict[str, float] = {config.trained: config.train.learning_rate}
        if value_settings:
            own = value_settings.value_learning_rate
            self._rates["value"] = config.train.learning_rate if own is None else own
        self.policy = zero.build(
            policy, config, learning_rate=self._rates[config.trained], total_steps=config.policy_optimizer_steps
        )
        self.value: DeepSpeedEngine | None = value and zero.build(
            value, config, learning_rate=self._rates["value"], total_steps=steps
        )
        self.reference: DeepSpeedEngine | None = reference and zero.prepare_deepspeed(reference, config)
        self._states = [HostStates(engine) for engine in (self.policy, self.value) if engine]
        self.head_options = {
            "temperature": config.generation.temperature,
            "workspace_gib": config.train.workspace_gib,
            "backend": config.train.kernel_backend,
        }

    @property
    def engines(self) -> dict[str, DeepSpeedEngine]:
        """The engines with state to train and to save, by name.

        Raises:
            RuntimeError: their optimizer states are offloaded.
        """
        if any(states.offloaded for states in self._states):
            raise RuntimeError(
                "the optimizer states are in host memory: call Trainer.reload() before training or saving"
            )
        return {self.config.trained: self.policy} | ({"value": self.value} if self.value else {})

    def recompute_activations(self) -> None:
        """Turns gradient checkpointing on in the models that are trained."""
        for engine in self.engines.values():
            models.recompute_activations(engine.module.model)

    def offload(self) -> int:
        """Moves the trained models' optimizer states and fp32 weights to host memory; gives the bytes freed on the GPU.

        Forward passes still work; ``reload`` must come before the next update or checkpoint.
        """
        return sum(states.offload() for states in self._states)

    def reload(self) -> None:
        """Brings back what ``offload`` moved, bit for bit."""
        for states in self._states:
            states.reload()

    def apply_settings(self) -> dict[str, learning_rate.Rates]:
        """Puts the configuration's learning rates and optimizer settings in place of a loaded checkpoint's.

        Returns:
            for each model, what that makes of the next learning rate.
        """
        return {
            name: learning_rate.apply_settings(engine, self.config, self._rates[name])
            for name, engine in self.engines.items()
        }

    def logprobs(self, engine: DeepSpeedEngine, samples: Sequence[Sample], temperature: float | None = None) -> Tensor:
        """[T] fp32 log-probabilities, in nats, of every response token under a policy.

        Args:
            temperature: the sampling temperature unless given.
        """
        options = self.head_options if temperature is None else self.head_options | {"temperature": temperature}
        return self._forward(engine, samples, lambda batch: engine(batch, **options))

    def reference_logprobs(self, samples: Sequence[Sample]) -> Tensor | None:
        """The same of the frozen reference, or of the policy without its adapters; None if the run has none."""
        if self.reference is not None:
            return self.logprobs(self.reference, samples)
        if not (self.config.has_reference and self.config.lora.rank):
            return None
        with lora.without_adapters(self.policy.module):
            return self.logprobs(self.policy, samples)

    def values(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        """The value model's estimates: [T] before each response token, [B] after the last."""
        assert self.value is not None
        value, ends = self.value, torch.full((len(samples),), torch.nan)

        def forward(batch: Microbatch) -> Tensor:
            rows, last = value(batch)
            if batch.counts:
                ends[torch.tensor(batch.indices)] = last.cpu()
            return rows

        return self._forward(value, samples, forward), ends

    @torch.no_grad()
    def _forward(
        self, engine: DeepSpeedEngine, samples: Sequence[Sample], forward: Callable[[Microbatch], Tensor]
    ) -> Tensor:
        store = TokenStore(samples)
        out = store.empty()
        engine.eval()
        singles = torch.arange(len(samples))[:, None]
        for batch in microbatches(samples, singles, self.config.train.tokens_per_microbatch, self.world):
            rows = forward(batch)
            if batch.counts:
                store.put(out, batch, rows.float().cpu())
        return out

    def update(
        self,
        samples: Sequence[Sample],
        tokens: dict[str, Tensor],
        objective: Objective,
        *,
        step: int,
        version: int,
        train_policy: bool = True,
    ) -> Update:
        """One update on a rollout batch: epochs, minibatches (optimizer steps), microbatches.

        A minibatch that has nothing to train on, on no rank, makes no optimizer step; the schedule, which counts
        planned ones, advances all the same.

        Args:
            samples: this rank's samples.
            tokens: [T] fp32 vectors: ``old_logprobs`` for a clipped loss, unless there is one optimizer step, whose own
                they are; ``sampler_logprobs`` (behaviour) to check the sampler's weights by, and to correct for its
                distance where the loss has an ``is_cap``; ``old_values`` with a value model; ``ref_logprobs`` where the
                loss has a ``kl_coef`` or compares pairs.
            objective: the algorithm's units, advantages, returns and loss.
            step: rollout batches trained on before; with the run's seed it fixes the minibatches.
            version: updates the policy has seen. Samples of an older one prove nothing about the sampler's weights.
            train_policy: False trains the value model alone.

        Raises:
            WeightsDisagreeError: before the first step, the trainer's log-probabilities of the samples are further from
                the sampler's than ``generation.max_logprob_gap``.
        """
        averages, store = Averages(self.world), TokenStore(samples)
        sampler, old = tokens.get("sampler_logprobs"), tokens.get("old_logprobs")
        ages = [version - sample.policy_version for sample in samples]
        if self.world.max(max(ages, default=-1)) != 0:  # some are older, or no rank has any
            sampler = None
        recomputed = old_source(self.config) == "pass"
        assert old is not None or not recomputed, "several optimizer steps, or rewards, need the old policy's values"
        if sampler is not None and old is not None and recomputed:
            self._check_gap(sampler, old, samples, step, averages)
            sampler = None
        scores = self.config.trained == "reward_model"
        own = store.empty() if not scores and (sampler is not None or old is None) else None
        unfilled = own  # until the first optimizer step, by the forward passes before it
        for name in ("advantages", "returns"):
            if (vector := getattr(objective, name)) is not None:
                tokens = tokens | {name: vector}
        trained = {name: engine for name, engine in self.engines.items() if train_policy or name != "policy"}
        for engine in self.engines.values():
            engine.train()
        for minibatch in minibatches(self.config, samples, objective, step, self.world):
            if minibatch.weights is None:
                for name, engine in trained.items():
                    self._note_rate(engine, name, averages)
                    learning_rate.advance(engine)
                continue
            losses, seen = [], []
            for batch, weight in zip(minibatch.batches, minibatch.weights, strict=True):
                row = {name: store.take(vector, batch) for name, vector in tokens.items()}
                if scores:
                    losses.append(score_pass(self.policy, batch, weight, samples, objective, averages))
                elif train_policy:
                    loss, logprobs = policy_pass(
                        self.policy, batch, weight, row, objective, self.config.train, self.head_options, averages
                    )
                    losses.append(loss)
                elif unfilled is not None:
                    with torch.no_grad():
                        logprobs = self.policy(batch, **self.head_options)
                if unfilled is not None and batch.counts:
                    seen.append((batch, logprobs.detach()))
                if self.value is not None:
                    assert self.config.value_settings is not None
                    value_pass(self.value, batch, weight, row, self.config.value_settings, averages)
            if unfilled is not None:
                for batch, logprobs in seen:
                    store.put(unfilled, batch, logprobs.cpu())
                if sampler is not None:
                    rows = store.rows(minibatch.units.flatten().tolist())
                    self._check_gap(sampler[rows], unfilled[rows], samples, step, averages)
                unfilled = None
            if train_policy:
                averages.add(
                    f"{self.config.trained}/loss", torch.stack(losses).sum() / self.world.size, 1.0 / self.world.size
                )
            for name, engine in trained.items():
                self._step(engine, name, averages)
        return Update(averages.means(), own if old is None else None)

    def _check_gap(
        self, sampler: Tensor, own: Tensor, samples: Sequence[Sample], step: int, averages: Averages
    ) -> None:
        """Compares sampler and trainer before the first optimizer step; fails above the limit."""
        gap = Gap.between(sampler, own, self.world)
        for name, value in gap.check(self.config.generation.max_logprob_gap, samples, step).items():
            averages.add_equal(name, value)

    def _step(self, engine: DeepSpeedEngine, name: str, averages: Averages) -> None:
        self._note_rate(engine, name, averages)
        if self.world.device.type == "cuda":
            # A step's few large tensors do not fit the blocks that PyTorch keeps of the passes' many smaller ones.
            torch.cuda.empty_cache()
        averages.add_equal(f"{name}/grad_norm", zero.step(engine))

    def _note_rate(self, engine: DeepSpeedEngine, name: str, averages: Averages) -> None:
        self.last_rates[name] = float(engine.get_lr()[0])
        averages.add_equal(f"{name}/lr", self.last_rates[name])
