"""The gradients, metrics and new weights of an update of a fixed batch, however it is split.

test_trainer starts it on two ranks, once for several updates. Usage: gradients.py MODEL OUT.pt CASE [CASE ...], a case
being ALGO,ZERO_STAGE,TOKENS_PER_MICROBATCH.
"""

import sys
from typing import Any

import torch

from engine.config import Config
from engine.machine.world import World, joined
from engine.rollouts import experience
from engine.sample import Sample
from engine.training import models, weights, zero
from engine.training.trainer import Trainer
from tests.system import updates

EPISODES = 8


def batch(seed: int = 0) -> list[Sample]:
    """Four groups of two, so that each of two ranks has whole ones."""
    return updates.batch(size=2, groups=EPISODES // 2, seed=seed)


def main(model: str, out: str, *cases: str) -> None:
    zero.REDUCE_BUCKET = 20_000  # some matrices are larger, as real embeddings are
    plain = zero._settings

    def settings(config: Config, stage: int) -> dict[str, Any]:
        """As the engine's, but ZeRO-3 releases matrices as small as these too; else nothing is ever gathered."""
        found = plain(config, stage)
        found["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return found

    zero._settings = settings
    with joined("cpu", 5) as world:
        results = {}
        for case in cases:
            algo, zero_stage, budget = case.split(",")
            results[case] = one_update(model, algo, int(zero_stage), int(budget), world)
        if world.main:
            torch.save(results, out)


def one_update(model: str, algo: str, zero_stage: int, budget: int, world: World) -> dict[str, object]:
    """The gradients (ZeRO-0), metrics and new weights of an algorithm's update on this rank's share of the batch."""
    config = Config.model_validate(
        {
            "algo": algo,
            "train": {
                "zero_stage": zero_stage,
                "tokens_per_microbatch": budget,
                "max_grad_norm": 0.0,
                "learning_rate": 1e-3,
                "adam_eps": 0.01,  # a first step near the gradient itself, instead of its sign, which rounding can flip
                "steps": 1,
            },
            "generation": {"max_logprob_gap": 100.0, "temperature": 0.7},
            "ppo": {"value_coef": 1.0},
        }
    )
    torch.manual_seed(0)
    value = models.load_value(model)[0] if algo == "ppo" else None
    if value is not None:
        torch.nn.init.normal_(value.model.score.weight, std=0.1)
    trainer = Trainer(config, world, policy=models.load_policy(model), reference=models.load_policy(model), value=value)
    if zero_stage == 3:
        held = [p for one in trainer.engines.values() for p in one.module.parameters() if p.ds_persist]
        assert not held, "every matrix comes and goes"
    share = EPISODES // world.size
    samples = batch()[world.rank * share : (world.rank + 1) * share]
    captured: dict[str, list[torch.Tensor]] = {}
    if zero_stage == 0:
        for name, engine in trainer.engines.items():
            parameters = list(engine.module.parameters())
            engine.optimizer.register_step_pre_hook(
                lambda *_, name=name, parameters=parameters: captured.update(
                    {name: [p.grad.clone() for p in parameters]}
                )
            )
    old = trainer.logprobs(trainer.policy, samples) + torch.tensor(0.05)
    behaviour = experience.behaviour_logprobs(samples)
    ref = trainer.logprobs(trainer.reference, samples) + 0.1 * behaviour
    values, ends = trainer.values(samples) if value is not None else (None, None)
    rollout = experience.rollout(samples, old, ref, values, ends)
    objective = experience.objective(config, rollout, 0.1, world)
    tokens = {"old_logprobs": old, "ref_logprobs": ref, "sampler_logprobs": behaviour}
    if values is not None:
        tokens["old_values"] = values - 0.1
    metrics = trainer.update(samples, tokens, objective, step=0, version=0).metrics
    after = {name: {n: t.clone() for n, t in weights.full_weights(e)} for name, e in trainer.engines.items()}
    return {"gradients": captured, "metrics": metrics, "weights": after}


if __name__ == "__main__":
    main(*sys.argv[1:])
