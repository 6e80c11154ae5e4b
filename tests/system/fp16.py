"""An update in fp16 beside the same one in fp32: how far each moves the weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from engine.machine.world import World
from engine.rollouts import experience
from engine.training import models, weights, zero
from engine.training.trainer import Trainer, Update
from tests.system import updates

SMALL = 1e-5
"""A factor on rewards (for pairs on beta), and so on gradients, below which fp16 has no numbers left for most."""
STRETCH = 100.0
"""How many gradients a step is long: beside it the rounding of the new weights is small."""


def trainer(path: str, algo: str, stage: int, dtype: str, world: World, small: float = SMALL) -> Trainer:
    """One whose optimizer moves weights by their gradients over ``small``: AdamW with an epsilon far above them."""
    train = {"adam_betas": (0.0, 0.0), "adam_eps": 1e6, "zero_stage": stage, "steps": 4, "schedule": "linear"}
    sections: dict[str, Any] = {
        "model": {"dtype": dtype},
        "kl": {"coef": 0.0},
        "dpo": {"beta": small},
        "ppo": {"whiten_advantages": False, "value_coef": small, "value_learning_rate": STRETCH * 1e6 / small},
        "train": train | {"learning_rate": STRETCH * 1e6 / (1.0 if algo == "ppo" else small)},
    }
    config, kind = updates.config(algo, **sections), getattr(torch, dtype)
    torch.manual_seed(0)
    reference = models.load_policy(path, dtype=kind) if config.loads_reference else None
    value = None
    if algo == "ppo":
        value, _ = models.load_value(path, dtype=kind)
        with torch.no_grad():  # the same numbers in either precision
            value.model.score.weight.copy_(0.1 * torch.randn(value.model.score.weight.shape))
    return Trainer(config, world, policy=models.load_policy(path, dtype=kind), reference=reference, value=value)


def update(one: Trainer, factor: float) -> Update:
    """An update on made-up samples, their rewards times ``factor``."""
    samples = updates.batch()
    for sample in samples:
        assert sample.reward is not None
        sample.reward *= factor
    old, ref = one.logprobs(one.policy, samples), one.reference_logprobs(samples)
    values, ends = one.values(samples) if one.value else (None, None)
    behaviour = old.clone()  # so that both precisions weigh the tokens alike
    rollout = experience.rollout(samples, old, ref, values, ends)
    objective = experience.objective(one.config, rollout, 0.0, one.world)
    tokens = {"old_logprobs": old, "sampler_logprobs": behaviour, "ref_logprobs": ref, "old_values": values}
    given = {name: vector for name, vector in tokens.items() if vector is not None}
    return one.update(samples, given, objective, step=0, version=1)


def whole(one: Trainer) -> dict[str, Tensor]:
    """A copy of every weight, gathered, by model and parameter; fp32."""
    return {
        f"{name}.{key}": tensor.float().clone()
        for name, engine in one.engines.items()
        for key, tensor in weights.full_weights(engine)
    }


def moves(one: Trainer, factor: float = SMALL) -> tuple[dict[str, Tensor], Update]:
    """How far an update moves each tensor, and what it gives."""
    before = whole(one)
    found = update(one, factor)
    return {name: tensor - before[name] for name, tensor in whole(one).items()}, found


def check_small_gradients(path: str, algo: str, stage: int, world: World) -> None:
    """Gradients that fp16 has no numbers for move the weights as in fp32, and are measured as there."""
    exact, exactly = moves(trainer(path, algo, 0, "float32", world))
    half, found = moves(trainer(path, algo, stage, "float16", world))
    for name, want in exact.items():
        assert float((half[name] - want).norm() / want.norm()) < 0.03, name
    for name in ("policy/loss", "policy/grad_norm", "policy/lr"):
        assert found.metrics[name] == pytest.approx(exactly.metrics[name], rel=0.02, abs=1e-9), name


def check_overflow(path: str, stage: int, world: World) -> None:
    """Gradients that are infinite in fp16 change no weight and lower the scale; the schedule goes on."""
    one = trainer(path, "rloo", stage, "float16", world)
    before, scale, rates = whole(one), zero.loss_scale(one.policy), []
    for _ in range(3):  # DeepSpeed puts up with one before it lowers the scale
        metrics = update(one, 1e7).metrics
        assert math.isfinite(metrics["policy/loss"])
        rates.append(metrics["policy/lr"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in whole(one).items())
    assert zero.loss_scale(one.policy) < scale
    assert rates == pytest.approx([rates[0], rates[0] * 3 / 4, rates[0] * 2 / 4])


SCALE = 2.0**16
"""DeepSpeed's first loss scale."""


def check_head(device: str, rows: int, width: int, vocabulary: int, size: float, backend: str | None = None) -> None:
    """Where fp32's gradients of the head have a value, fp16's have one, if the scale is in the rows' weights.

    ``size`` is of an advantage. Multiplied onto the loss, as the scale used to be, it comes too late for many.
    """
    torch.manual_seed(0)
    hidden = torch.randn(rows, width, device=device, dtype=torch.float16)
    weight = (0.02 * torch.randn(vocabulary, width, device=device)).half()
    targets = torch.randint(vocabulary, (rows,), device=device)
    advantages = size * torch.randn(rows, device=device)
    share = torch.full((rows,), 1.0 / rows, device=device)

    def gradients(dtype: torch.dtype, inside: float, outside: float) -> tuple[Tensor, Tensor]:
        leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in (hidden, weight)]
        found = kernels.linear_policy_loss(
            *leaves, targets, advantages=advantages, token_weights=share * inside, loss="reinforce", backend=backend
        )
        (found.loss / inside * inside * outside).backward()
        dhidden, dweight = (leaf.grad.float() / (inside * outside) for leaf in leaves if leaf.grad is not None)
        return dhidden, dweight

    def lost(got: Tensor, want: Tensor) -> float:
        return float(((got == 0) & (want != 0)).sum() / (want != 0).sum())

    exact = gradients(torch.float32, 1.0, 1.0)
    first, late = gradients(torch.float16, SCALE, 1.0), gradients(torch.float16, 1.0, SCALE)
    losses = []
    for got, after, want in zip(first, late, exact, strict=True):
        assert float((got - want).norm() / want.norm()) < 1e-3
        assert lost(got, want) < 1e-4
        losses.append(lost(after, want))
    assert min(losses) > 1e-3, f"these inputs are none that the scale matters for: {losses}"
