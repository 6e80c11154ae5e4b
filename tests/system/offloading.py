"""Updates with and without the optimizer states leaving for the host in between; started by test_offload on 2 ranks.

Usage: offloading.py MODEL FOLDER
"""

import sys
from pathlib import Path

import torch

from engine.config import Config
from engine.machine.world import World, joined
from engine.rollouts import experience
from engine.run_folder import checkpoints
from engine.training import models, weights
from engine.training.trainer import Trainer
from tests.system import gradients


def trainer(model: str, stage: int, dtype: str, world: World, seed: int = 0) -> Trainer:
    """A policy and a value model, at a learning rate at which every step shows."""
    config = Config.model_validate(
        {
            "algo": "ppo",
            "model": {"dtype": dtype},
            "train": {"zero_stage": stage, "tokens_per_microbatch": 16, "learning_rate": 1e-2, "steps": 4},
            "generation": {"max_logprob_gap": 100.0},
            "kl": {"coef": 0.0},
            "ppo": {"value_coef": 1.0},
        }
    )
    numbers = getattr(torch, dtype)
    torch.manual_seed(seed)
    value, _ = models.load_value(model, dtype=numbers)
    torch.nn.init.normal_(value.model.score.weight, std=0.1)
    return Trainer(config, world, policy=models.load_policy(model, dtype=numbers), reference=None, value=value)


def update(one: Trainer, seed: int) -> dict[str, float]:
    """One optimizer step of both models on this rank's share of a batch of uneven lengths."""
    share = gradients.EPISODES // one.world.size
    samples = gradients.batch(seed)[one.world.rank * share : (one.world.rank + 1) * share]
    old = one.logprobs(one.policy, samples)
    values, ends = one.values(samples)
    objective = experience.objective(one.config, experience.rollout(samples, old, None, values, ends), 0.0, one.world)
    tokens = {"old_logprobs": old, "sampler_logprobs": experience.behaviour_logprobs(samples), "old_values": values}
    return one.update(samples, tokens, objective, step=seed, version=0).metrics


def everything(one: Trainer) -> list[torch.Tensor]:
    """Weights of both models, and what their optimizers remember."""
    found = []
    for engine in one.engines.values():
        found += [tensor.clone() for _, tensor in weights.full_weights(engine)]
        found += [t.clone() for s in engine.basic_optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    return found


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def compare(model: str, stage: int, dtype: str, world: World, steps: int = 2) -> Trainer:
    """A cycle before each step, and so the first without moments; fails where one bit differs."""
    plain, cycled = (trainer(model, stage, dtype, world) for _ in range(2))
    for seed in range(steps):
        cycled.offload()
        cycled.reload()
        assert update(plain, seed) == update(cycled, seed)
        assert same(everything(plain), everything(cycled)), (stage, dtype, seed)
    return cycled


def main(model: str, folder: str) -> None:
    with joined("cpu", 1) as world:
        for stage, dtype in ((2, "float32"), (3, "bfloat16")):
            one = compare(model, stage, dtype, world)
            path = checkpoints.save(Path(folder) / str(stage), checkpoints.OnlineTrainerState(), one, [], world, keep=1)
            other = trainer(model, stage, dtype, world, seed=1)
            checkpoints.load(path, other, world)
            other.offload()
            other.reload()
            assert same(everything(one), everything(other)), "what a checkpoint restores can be offloaded"
            assert update(one, 3) == update(other, 3)
            assert same(everything(one), everything(other))


if __name__ == "__main__":
    main(*sys.argv[1:])
