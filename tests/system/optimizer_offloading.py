"""Updates by the GPU's optimizer and by the CPU's, and what a checkpoint brings back; also started on two ranks.

Usage: optimizer_offloading.py MODEL FOLDER
"""

import sys
from pathlib import Path

import torch

from engine.config import Config
from engine.machine.world import World, joined
from engine.run_folder import checkpoints
from engine.training import models, weights
from engine.training.trainer import Trainer
from tests.system import offloading

STEPS = 3


def trainer(model: str, stage: int, dtype: str, world: World, place: str, seed: int = 0) -> Trainer:
    """A policy and a value model, whose optimizers are in ``place``; microbatches are smaller than a batch."""
    config = Config.model_validate(
        {
            "algo": "ppo",
            "model": {"dtype": dtype},
            "train": {"tokens_per_microbatch": 16, "learning_rate": 1e-3, "steps": 4, "weight_decay": 0.01}
            | {"zero_stage": stage, "optimizer_offload": place},
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


def policy(one: Trainer) -> torch.Tensor:
    return torch.cat([tensor.clone().flatten() for _, tensor in weights.full_weights(one.policy)])


def compare(model: str, stage: int, dtype: str, world: World) -> Trainer:
    """The first steps move the weights alike, up to the rounding of two implementations of AdamW.

    A step moves no weight further than about the learning rate. In bfloat16 one that is rounded to the other side is a
    unit in the last place off, and changes the steps after it.
    """
    plain, on_host = (trainer(model, stage, dtype, world, place) for place in ("none", "cpu"))
    before = policy(plain)
    for seed in range(STEPS):
        metrics, others = offloading.update(plain, seed), offloading.update(on_host, seed)
        for name in ("policy/grad_norm", "value/grad_norm"):
            assert abs(metrics[name] / others[name] - 1) < (1e-5 if dtype == "float32" else 2e-3), (stage, dtype, seed)
    moved, apart = (policy(plain) - before).float(), (policy(on_host) - policy(plain)).float()
    assert moved.norm() > 0 and apart.norm() < (1e-3 if dtype == "float32" else 0.1) * moved.norm()
    for engine in (on_host.policy, on_host.value):
        assert engine.optimizer.device in ("cpu", torch.device("cpu")), "DeepSpeed keeps its states there"
    return on_host


def resumed(one: Trainer, folder: Path, model: str, stage: int, dtype: str, world: World) -> None:
    """What a checkpoint brings back goes on bit for bit."""
    path = checkpoints.save(folder, checkpoints.OnlineTrainerState(), one, [], world, keep=1)
    other = trainer(model, stage, dtype, world, "cpu", seed=1)
    checkpoints.load(path, other, world)
    assert offloading.update(one, STEPS) == offloading.update(other, STEPS)
    assert offloading.same(offloading.everything(one), offloading.everything(other))


def main(model: str, folder: str) -> None:
    with joined("cpu", 5) as world:
        for stage, dtype in ((2, "float32"), (3, "bfloat16")):
            one = compare(model, stage, dtype, world)
            resumed(one, Path(folder) / str(stage), model, stage, dtype, world)


if __name__ == "__main__":
    main(*sys.argv[1:])
