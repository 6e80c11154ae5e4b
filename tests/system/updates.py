"""Updates by every algorithm, of models that stay where they are, and what they would have been moved by.

Usage on two ranks: updates.py MODEL OUT.pt, the checks of test_invariance that need a rank with nothing to train on.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from algorithms.rollout import Objective
from engine.config import Config
from engine.machine.world import World, joined
from engine.rollouts import experience, off_policy
from engine.sample import Sample
from engine.training import models
from engine.training.trainer import Trainer

ALGORITHMS = ("ppo", "rloo", "grpo", "online_dpo", "bok")
TEMPERATURE = 0.7


def batch(size: int = 4, groups: int = 3, seed: int = 0) -> list[Sample]:
    """Prompts with ``size`` responses each: uneven lengths, no two rewards alike, made-up log-probabilities."""
    rng = random.Random(groups * size + seed)
    samples = []
    for i in range(groups * size):
        if i % size == 0:
            prompt = [1] + [rng.randint(3, 14) for _ in range(rng.randint(2, 6))]
        length = rng.randint(1, 6)
        samples.append(
            Sample(
                index=i,
                group_id=i // size,
                prompt_ids=prompt,
                response_ids=[rng.randint(0, 14) for _ in range(length)],
                reward=rng.random(),
                policy_version=0,
                behaviour_logprobs=np.array([-2 - rng.random() for _ in range(length)], np.float32),
                finish_reason=rng.choice(["stop", "length"]),
            )
        )
    return samples


def drift(sample: Sample) -> torch.Tensor:
    """How far, in nats, the old policy is from the trained one at each token; enough for some ratios to be clipped."""
    return 0.2 * torch.randn(len(sample.response_ids), generator=torch.Generator().manual_seed(sample.index))


def config(algo: str, **sections: dict[str, Any]) -> Config:
    train = {"steps": 1, "learning_rate": 0.0, "tokens_per_microbatch": 60, "max_grad_norm": 0.0}
    generation = {"temperature": TEMPERATURE, "max_logprob_gap": 1e9}
    correction = {"correction": algo in ("ppo", "rloo", "grpo")}
    ppo = {"value_coef": 1.0, "bootstrap_truncated": True}
    kl = {"coef": 0.1}
    defaults = {"train": train, "generation": generation, "off_policy": correction, "kl": kl, "ppo": ppo}
    return Config.model_validate(
        {"algo": algo} | {k: defaults.get(k, {}) | sections.get(k, {}) for k in defaults | sections}
    )


@dataclass
class Update:
    metrics: dict[str, float]
    gradients: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Of each model by parameter; none of a model that took no optimizer step."""

    def away_from(self, other: Update) -> float:
        """The furthest that a model's gradient is from the other's, relative to its norm."""
        assert self.gradients and self.gradients.keys() == other.gradients.keys()
        flat = [
            [torch.cat([g.flatten() for g in one.gradients[name].values()]) for one in (self, other)]
            for name in self.gradients
        ]
        return max(float((a - b).norm() / b.norm()) for a, b in flat)


class Updates:
    """An engine a model, shared by all updates: with the learning rate 0 none of them moves a weight."""

    def __init__(self, model: str, world: World) -> None:
        self.world = world
        torch.manual_seed(0)
        reference, (value, _) = models.load_policy(model), models.load_value(model)
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
            torch.nn.init.normal_(value.model.score.weight, std=0.1)
        self.trainer = Trainer(config("ppo"), world, policy=models.load_policy(model), reference=reference, value=value)
        self.value = self.trainer.value
        self._captured: dict[str, dict[str, torch.Tensor]] = {}
        for name, engine in self.trainer.engines.items():
            parameters = dict(engine.module.named_parameters())
            engine.optimizer.register_step_pre_hook(
                lambda *_, name=name, parameters=parameters: self._captured.update(
                    {name: {n: p.grad.clone() for n, p in parameters.items()}}
                )
            )

    def __call__(
        self,
        algo: str,
        samples: Sequence[Sample],
        change: Callable[[Objective, dict[str, torch.Tensor]], Objective] = lambda objective, _: objective,
        own_old: bool = False,
        **sections: dict[str, Any],
    ) -> Update:
        """One update on this rank's samples, those of them that are usable, as the loop makes it.

        With ``own_old`` the old policy is the trained one, and only the update knows its log-probabilities.
        """
        trainer, world = self.trainer, self.world
        trainer.config = config(algo, **sections)
        trainer.value = self.value if algo == "ppo" else None
        samples = experience.usable(samples, trainer.config)
        drifts = [drift(sample) for sample in samples]
        old = None
        if not own_old:
            old = trainer.logprobs(trainer.policy, samples) + (torch.cat(drifts) if drifts else torch.empty(0))
        behaviour = experience.behaviour_logprobs(samples)
        ref = trainer.reference_logprobs(samples)
        values, ends = trainer.values(samples) if trainer.value else (None, None)
        rollout = experience.rollout(samples, old, ref, values, ends)
        objective = experience.objective(trainer.config, rollout, trainer.config.kl.coef, world)
        tokens = {"ref_logprobs": ref, "sampler_logprobs": behaviour}
        if old is not None:
            tokens["old_logprobs"] = old
        if values is not None:
            tokens["old_values"] = values - 0.1
        objective = change(objective, tokens)
        self._captured.clear()
        found, made = trainer.update(samples, tokens, objective, step=0, version=0)
        if old is None:
            old, rollout = made, dataclasses.replace(rollout, old_logprobs=made)
        seen = experience.metrics(samples, rollout, world, verified=False)
        stale = off_policy.metrics(trainer.config, samples, old, behaviour, 0, world)
        return Update(objective.metrics | found | seen | stale, dict(self._captured))


def two_ranks(model: str, out: str) -> None:
    """Rank 0 has the first two groups and rank 1 nothing: all dropped, or all tied; then the other way round."""
    with joined("cpu", 5) as world:
        update, results = Updates(model, world), {}
        for case, without in (("dropped", 1), ("tied", 1), ("dropped", 0)):
            for algo in ALGORITHMS if case == "dropped" else ("online_dpo",):
                samples = batch(groups=2)
                if world.rank == without:
                    for one in samples:
                        one.reward = None if case == "dropped" else 0.5
                results[algo, case, without] = update(algo, samples)
        samples = batch(groups=2) if world.main else []
        results["grpo", "own", 1] = update("grpo", samples, own_old=True)
        samples = batch(groups=2)
        for one in samples:
            one.reward = 0.5
        results["nothing"] = update("online_dpo", samples)
        if world.main:
            torch.save({key: vars(value) for key, value in results.items()}, out)


if __name__ == "__main__":
    two_ranks(*sys.argv[1:])
