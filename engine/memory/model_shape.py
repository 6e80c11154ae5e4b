"""The sizes of a model, from its config.json and the headers of its safetensors files; no torch, no weights."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import ConfigError
from engine.config.quoted import words
from engine.models import weight_files

Tensors = dict[str, tuple[int, ...]]
"""Shapes by name."""

HEADS = ("lm_head.", "embed_out.")
"""What language-model heads are called; the second is GPT-NeoX's."""
ALIASES = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
"""GPT-2's words."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What decides a decoder's memory. Counts are numbers, not bytes."""

    kind: str
    """``model_type`` of its configuration."""
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    """The head's weight is the embedding's."""
    qk_norm: bool
    softcap: bool
    """Logits are soft-capped."""
    backbone: int
    """Parameters of everything but the head, the embedding among them."""

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, its largest tensor."""
        return self.vocabulary * self.hidden

    @property
    def layer(self) -> int:
        """Parameters of a decoder layer."""
        return (self.backbone - self.embedding) // self.layers

    @property
    def policy(self) -> int:
        """Parameters of the causal language model, a tied head counted once."""
        return self.backbone + (0 if self.tied else self.embedding)

    @property
    def value(self) -> int:
        """Parameters of the same backbone with a head of one output."""
        return self.backbone + self.hidden

    def adapters(self, rank: int) -> int:
        """Parameters of LoRA adapters beside all linear layers but the head, as Llama and Qwen have them."""
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * (self.hidden + query) + 2 * (self.hidden + key_value)
        return self.layers * rank * (attention + 3 * (self.hidden + self.intermediate))

    def with_vocabulary(self, rows: int) -> ModelShape:
        """The same model with so many rows in its embedding, and in its head."""
        more = (rows - self.vocabulary) * self.hidden
        return dataclasses.replace(self, vocabulary=rows, backbone=self.backbone + more)


def read(key: str, path: str) -> ModelShape:
    """The shape of a Hugging Face folder, or of a model of that name on the hub.

    Args:
        key: the setting that named it, for messages.

    Raises:
        ConfigError: no such model, or one whose configuration does not say these sizes.
    """
    config, tensors = _folder(Path(path)) if os.path.isdir(path) else _hub(key, path)
    try:
        return from_config(config, tensors)
    except KeyError as error:
        raise ConfigError(
            f"{key}: the configuration of '{path}' has no {error.args[0]}, by which its memory is planned"
        ) from None


def from_config(config: dict[str, Any], tensors: Tensors | None = None) -> ModelShape:
    """The shape by config.json; parameters are counted in ``tensors``, or, without any, as Llama and Qwen have them."""
    config = {name: config[alias] for name, alias in ALIASES.items() if alias in config} | config
    hidden, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    intermediate = config.get("intermediate_size") or 4 * hidden
    vocabulary, kind = config["vocab_size"], config.get("model_type", "")
    qk_norm = kind.startswith("qwen3")
    if tensors:
        tied = not any(name.startswith(HEADS) for name in tensors) or bool(config.get("tie_word_embeddings"))
        backbone = sum(math.prod(shape) for name, shape in tensors.items() if not name.startswith((*HEADS, "score.")))
    else:
        tied = bool(config.get("tie_word_embeddings"))
        query, key_value = heads * head_dim, kv_heads * head_dim
        biases = query + 2 * key_value if kind == "qwen2" or config.get("attention_bias") else 0
        layer = 2 * hidden * (query + key_value) + biases + 3 * hidden * intermediate + 2 * hidden
        layer += 2 * head_dim if qk_norm else 0
        backbone = vocabulary * hidden + layers * layer + hidden
    return ModelShape(
        kind=kind,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocabulary=vocabulary,
        tied=tied,
        qk_norm=qk_norm,
        softcap=bool(config.get("final_logit_softcapping")),
        backbone=backbone,
    )


def _folder(folder: Path) -> tuple[dict[str, Any], Tensors]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"'{folder}' is no model folder: config.json: {error}") from None
    tensors: Tensors = {}
    for _, header in weight_files.headers(folder):
        tensors |= {name: tuple(tensor["shape"]) for name, tensor in header.items()}
    return config, tensors


def _hub(key: str, name: str) -> tuple[dict[str, Any], Tensors]:
    """From the local cache, else from the hub: the configuration and the headers alone."""
    import huggingface_hub as hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, NotASafetensorsRepoError

    try:
        with contextlib.suppress(LocalEntryNotFoundError):
            folder = Path(hub.snapshot_download(name, local_files_only=True))
            if (folder / "config.json").exists():
                return _folder(folder)
        config = json.loads(Path(hub.hf_hub_download(name, "config.json")).read_text(encoding="utf-8"))
        try:
            files = hub.get_safetensors_metadata(name).files_metadata.values()
        except NotASafetensorsRepoError:
            return config, {}
        return config, {name: tuple(tensor.shape) for file in files for name, tensor in file.tensors.items()}
    except (OSError, HFValidationError) as error:
        raise ConfigError(
            f"{key}: '{name}' is neither a folder nor to be had from the hub: {words(error):.200}"
        ) from None
