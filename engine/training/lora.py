"""LoRA (Hu et al. 2021, arXiv 2106.09685) through peft: trained adapters beside the policy's frozen linear layers.

Without its adapters the policy is the one it started from, and so its own reference. The sampler and exports get merged
weights, W + alpha / rank · B A, made one at a time on their way out; the model's own are never written to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from engine.config import ConfigError, Lora

FACTOR = re.compile(r"\.lora_([AB])\.default\.weight$")
"""Ends the names of an adapter's two matrices: A is [rank, in], B is [out, rank]."""
SCORE = "score"
"""What transformers calls the head of a sequence classifier."""
BASE = ".base_layer."
"""What peft puts into the names of the weights and biases that an adapter stands beside."""


def add_adapters(model: Any, settings: Lora, seed: int) -> None:
    """Puts an adapter beside each linear layer that is asked for and freezes all else; B is zero, so nothing changes.

    Args:
        model: a transformers model; its head gets no adapter, and where that is a reward model's it is trained itself.
        settings: ``lora``, with a rank.
        seed: fixes A, whatever was drawn before.

    Raises:
        ConfigError: ``lora.target_modules`` has a name that no linear layer has.
    """
    import peft

    score = getattr(model, SCORE, None)
    head = score or model.get_output_embeddings()
    linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head}
    chosen = list(linear)
    if targets := settings.target_modules:
        chosen = [name for name in linear if f".{name}".endswith(tuple(f".{target}" for target in targets))]
        if unknown := [one for one in targets if not any(f".{name}".endswith(f".{one}") for name in linear)]:
            there = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise ConfigError(f"lora.target_modules: the model has no linear layer '{unknown[0]}', only: {there}")
    options = peft.LoraConfig(
        base_model_name_or_path=model.name_or_path,
        task_type="SEQ_CLS" if score else "CAUSAL_LM",
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=chosen,
        fan_in_fan_out=all(isinstance(linear[name], Conv1D) for name in chosen),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(options, model)
    if score:
        score.requires_grad_(True)
        options.modules_to_save = [SCORE]  # for who loads the adapter; peft would put a copy of the head beside it
    for parameter in model.parameters():  # not the whole model: the frequencies of RoPE stay in fp32
        parameter.data = parameter.data.to(model.dtype)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Forward passes inside are those of the policy that training started from."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def base_name(name: str) -> str:
    """A parameter's name in a model without adapters."""
    return name.replace(BASE, ".")


def factors_first(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The same parameters in the same order, but each adapter ahead of the weight it stands beside."""
    for _, layer in groupby(named, key=lambda one: re.split(r"\.base_layer\.|\.lora_[AB]\.", one[0])[0]):
        yield from sorted(layer, key=lambda one: FACTOR.search(one[0]) is None)


def merged(named: Iterable[tuple[str, Tensor]], model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors by a model's names without adapters, which are merged into the weights they stand beside.

    Args:
        named: the parameters of ``model``, as ``factors_first`` orders them; each is used before the next is taken.
    """
    factors: dict[str, Tensor] = {}
    for name, tensor in named:
        if found := FACTOR.search(name):
            factors[found[1]] = tensor.clone()
        elif factors and name.endswith(f"{BASE}weight"):
            layer: Any = model.get_submodule(name.removesuffix(f"{BASE}weight"))
            left, right = factors["B"].float(), factors["A"].float()
            if layer.fan_in_fan_out:
                left, right = right.T, left.T
            whole = torch.addmm(tensor.float(), left, right, alpha=layer.scaling["default"])
            yield base_name(name), whole.to(tensor.dtype)
            factors = {}
        else:
            yield base_name(name), tensor


def save(model: Any, trained: dict[str, Tensor], folder: Path) -> None:
    """Writes what LoRA trains of ``model``, given by its names there, in peft's own format."""
    folder.mkdir(parents=True)
    model.peft_config["default"].save_pretrained(folder)
    named = {f"base_model.model.{name.replace('.default.', '.')}": tensor for name, tensor in trained.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
