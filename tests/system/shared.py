"""Tiny models of each kind whose weights trainer and sampler share; started by test_shared_weights on 2 ranks.

Usage: shared.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers
from deepspeed.runtime.engine import DeepSpeedEngine
from transformers import PreTrainedModel

from engine.config import Config
from engine.generation.shared_weights import SharedWeights, end_to_end
from engine.machine.world import joined
from engine.training import models, zero

KINDS = ("Qwen2", "Llama", "Qwen3")


def make_model(kind: str, tied: bool, **shape: int) -> PreTrainedModel:
    """Two layers with grouped heads, far from uniform predictions, norms that are not 1 and biases that are not 0."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2} | shape
    heads = max(2, sizes["hidden_size"] // 64)
    config = getattr(transformers, f"{kind}Config")(
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=sizes["hidden_size"] // heads,
        initializer_range=0.15,
        tie_word_embeddings=tied,
        **sizes,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def train(folder: str | Path, stage: int, dtype: str, learning_rate: float = 0.1) -> DeepSpeedEngine:
    """The folder's model as a policy under training."""
    policy = models.load_policy(str(folder), dtype=getattr(torch, dtype))
    config = Config.model_validate({"model": {"dtype": dtype}, "train": {"zero_stage": stage}})
    return zero.build(policy, config, learning_rate=learning_rate, total_steps=100)


def step(engine: DeepSpeedEngine, seed: int) -> None:
    """Moves every weight by about the learning rate, in a random direction."""
    generator = torch.Generator().manual_seed(seed)
    terms = []
    for parameter in engine.module.parameters():
        direction = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        terms.append((parameter.float() * direction).sum())
    engine.backward(torch.stack(terms).sum(), scale_wrt_gas=False)
    engine.step()


def follow(folder: str | Path, stage: int, dtype: str) -> int:
    """Checks over three steps that every fused matrix is its parts, where it was; gives how many there are."""
    engine = train(folder, stage, dtype)
    shared = SharedWeights(engine)
    assert shared.fits() is None, shared.fits()
    shared.register()
    views = {name: end_to_end(parts) for name, parts in shared._fused.items()}
    for number in range(3):
        before = {name: view.clone() for name, view in views.items()}
        step(engine, number)
        now = dict(engine.module.model.named_parameters())
        for name, parts in shared._fused.items():
            assert all(any(part is one for one in now.values()) for part in parts), name
            assert torch.equal(views[name], torch.cat([part.detach() for part in parts])), (name, number)
            assert (views[name] != before[name]).float().mean() > 0.9, (name, number)
    return len(views)


def main(folder: str) -> None:
    with joined("cpu", 5):
        for kind in KINDS:
            for stage in (0, 1, 2):
                follow(f"{folder}/{kind}", stage, "bfloat16")


if __name__ == "__main__":
    main(sys.argv[1])
