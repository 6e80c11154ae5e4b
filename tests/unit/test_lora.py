"""LoRA before a model loads: what it takes in the memory plan, what it needs; and merging where peft transposes."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch

from engine import run
from engine.config import Config, ConfigError, Lora
from engine.memory import planning
from engine.memory.units import GIB
from engine.training import lora, models, weights
from tests.unit.test_memory_plan import QWEN2_1B5, N, configured

ADAPTERS = 28 * 16 * (2 * (1536 + 1536) + 2 * (1536 + 256) + 3 * (1536 + 8960))
"""Parameters of rank 16 beside q and o, k and v, and the MLP's three matrices in 28 layers."""


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("qwen")
    (folder / "config.json").write_text(json.dumps(QWEN2_1B5))
    return str(folder)


@pytest.mark.parametrize("stage,weights_of", [(0, N), (2, N), (3, N // 2)])
def test_only_adapters_have_states_and_no_reference_is_loaded(qwen: str, stage: int, weights_of: int) -> None:
    def plan(**changes: Any) -> planning.MemoryPlan:
        return planning.plan(configured(qwen, algo="grpo", train__zero_stage=stage, **changes), 2, 80 * GIB)

    adapted = plan(lora__rank=16)
    parts = adapted.phases["train"].parts
    assert parts["policy weights"] == 2 * (weights_of + ADAPTERS)
    assert parts["policy fp32 and AdamW"] == 12 * (ADAPTERS if stage == 0 else ADAPTERS // 2)
    assert "reference weights" not in parts and not adapted.zero_copy, "the sampler has merged weights of its own"
    assert plan(lora__rank=16, model__reference_path=qwen).phases["train"].parts["reference weights"]
    assert adapted.phases["train"].total < plan(memory__zero_copy="off").phases["train"].total - 4 * GIB


def test_a_missing_package_is_said_before_anything_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else find(name))
    with pytest.raises(ConfigError, match=r"the package peft is missing, lora\.rank needs it"):
        run._check_packages(Config.model_validate({"lora": {"rank": 8}}))


def test_transposed_layers_are_merged_as_peft_does(tmp_path: Path) -> None:
    """GPT-2 keeps its matrices as [in, out]."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"vocab_size": 15, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(bos_token_id=1, eos_token_id=2, **shape)).save_pretrained(tmp_path)
    policy = models.load_policy(str(tmp_path))
    names = [name for name, _ in policy.model.named_parameters()]
    lora.add_adapters(policy.model, Lora(rank=2), 0)
    for name, parameter in policy.model.named_parameters():
        if lora.FACTOR.search(name):
            torch.nn.init.normal_(parameter)
    outgoing = dict(weights.full_weights(SimpleNamespace(module=policy)))  # type: ignore[arg-type]
    merged = copy.deepcopy(policy.model)
    for layer in merged.modules():
        if isinstance(layer, peft.tuners.tuners_utils.BaseTunerLayer):
            layer.merge()
    assert list(outgoing) == names
    for name, parameter in merged.named_parameters():
        if not lora.FACTOR.search(name):
            torch.testing.assert_close(outgoing[lora.base_name(name)], parameter.detach(), rtol=1e-6, atol=1e-6)
