"""Updates with ZeRO-3, which gathers whole layers, against ZeRO-1; started by test_whole_layers on two ranks.

Usage: whole_layers.py FOLDER KIND...
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers
from deepspeed.utils import get_z3_leaf_modules

from engine.config import Config
from engine.machine.world import World, joined
from engine.training import lora, models, weights
from engine.training.trainer import Trainer
from tests.system import offloading

LAYERS = 3
# Matrices of up to 100,000 elements ZeRO-3 would never release.
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 800,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
ADAPTERS = {"everywhere": [], "from the second layer on": ["1.self_attn.q_proj", "2.mlp.down_proj"]}


def make(kind: str, folder: Path) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(vocab_size=16, **SIZES)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)


def trained(model: str, stage: int, adapters: list[str] | None, checkpointing: bool, world: World) -> Trainer:
    """A policy and a value model after two updates, by AdamW with an epsilon at which a gradient's size shows too."""
    rank = {"rank": 0 if adapters is None else 2, "target_modules": adapters or []}
    train = {"zero_stage": stage, "tokens_per_microbatch": 16, "learning_rate": 1e-2, "adam_eps": 0.01, "steps": 4}
    config = Config.model_validate(
        {
            "algo": "ppo",
            "lora": rank,
            "train": train,
            "generation": {"max_logprob_gap": 100.0},
            "kl": {"coef": 0.1},
            "ppo": {"value_coef": 1.0},
        }
    )
    torch.manual_seed(0)
    value, _ = models.load_value(model, checkpointing)
    torch.nn.init.normal_(value.model.score.weight, std=0.1)
    policy = models.load_policy(model, checkpointing)
    if adapters is not None:
        lora.add_adapters(policy.model, config.lora, 0)
    reference = models.load_policy(model) if adapters is None else None
    one = Trainer(config, world, policy=policy, reference=reference, value=value)
    for seed in range(2):
        offloading.update(one, seed)
    return one


def compare(model: str, adapters: list[str] | None, checkpointing: bool, world: World) -> list[int]:
    """Fails where weights differ; gives how many layers of policy, value model and reference ZeRO-3 takes whole."""
    plain, whole = (trained(model, stage, adapters, checkpointing, world) for stage in (1, 3))
    for name in plain.engines:
        pairs = zip(weights.full_weights(plain.engines[name]), weights.full_weights(whole.engines[name]), strict=True)
        for (key, a), (other, b) in pairs:
            assert key == other
            assert torch.allclose(b, a, rtol=0, atol=1e-6), (model, name, key, (b - a).abs().max())
    samples = offloading.gradients.batch(0)[: 4 * world.size][world.rank :: world.size]
    torch.testing.assert_close(whole.reference_logprobs(samples), plain.reference_logprobs(samples), rtol=0, atol=1e-5)
    engines = [whole.policy, whole.value, whole.reference]
    return [len(get_z3_leaf_modules(engine.module)) for engine in engines if engine]


def main(folder: str, *kinds: str) -> None:
    with joined("cpu", 1) as world:
        for kind in kinds:
            if world.main:
                make(kind, Path(folder) / kind)
            world.barrier()
            for checkpointing in (False, True) if kind == "Qwen2" else (True,):
                found = compare(f"{folder}/{kind}", None, checkpointing, world)
                assert found == [LAYERS] * 3, (kind, found)
        for where, adapters in ADAPTERS.items() if "Qwen2" in kinds else ():
            found = compare(f"{folder}/Qwen2", adapters, adapters == [], world)
            assert found == [LAYERS - 1, LAYERS], (where, found)


if __name__ == "__main__":
    main(*sys.argv[1:])
