"""A model's folder before its weights load: its configuration, and what its files tell without being read.

What the model computes is looked at later, when it is loaded (``engine.training.behaviour``).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Numbers that can be trained, by safetensors' names."""
LONGEST_HEADER = 100_000_000
"""Bytes; safetensors itself takes none that is longer."""


def read_config(key: str, path: str) -> PreTrainedConfig:
    """A model's configuration, after everything that its files alone can show to be wrong.

    Args:
        key: the setting that named the model, for messages.
        path: a folder or hub name.

    Raises:
        ConfigError: there is none; the model brings code of its own; its weights are quantised, absent or torn.
    """
    from transformers import AutoConfig

    folder = Path(path)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigError(f"{key}: '{path}' is no model folder, it has no config.json")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # OSError, ValueError, KeyError, …: whatever a file can make transformers say
        said = " ".join(str(error).split())
        if "trust_remote_code" in said:
            raise ConfigError(
                f"{key}: '{path}' brings code of its own (auto_map in config.json), and Tandem runs none: take a model "
                "whose kind transformers has built in"
            ) from error
        raise ConfigError(f"{key}: the configuration of '{path}' cannot be read: {said:.200}") from error
    if method := _quantisation(config):
        raise ConfigError(_quantised(key, path, method))
    if folder.is_dir():
        _check_files(key, folder)
    return config


def dtype(path: str) -> str | None:
    """The numbers that most of a local folder's weights are in, as torch calls them; None where its files don't say."""
    counts: Counter[str] = Counter()
    for _, tensors in _headers(Path(path)):
        for tensor in tensors.values():
            begin, end = tensor["data_offsets"]
            counts[tensor["dtype"]] += end - begin
    return FLOATS.get(counts.most_common(1)[0][0]) if counts else None


def longest_sequence(config: PreTrainedConfig) -> int | None:
    """Positions a model has; None for one without a limit."""
    longest: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return longest


def _quantisation(config: Any) -> str | None:
    for one in (config, config.get_text_config()):
        if settings := getattr(one, "quantization_config", None):
            method = settings.get("quant_method") if isinstance(settings, dict) else None
            return str(method or "quantization_config in config.json")
    return None


def _quantised(key: str, path: str | Path, method: str) -> str:
    return f"{key}: '{path}' is quantised ({method}) and cannot be trained: take the model in bfloat16 or float32"


def _check_files(key: str, folder: Path) -> None:
    """Raises ConfigError for a folder whose weights are quantised, absent or torn."""
    named = [folder / name for name in ("model.safetensors", "pytorch_model.bin") if (folder / name).is_file()]
    for index in (folder / f"{name}.index.json" for name in ("model.safetensors", "pytorch_model.bin")):
        if index.is_file():
            try:
                named += [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise ConfigError(f"{key}: {index} is no index of weights: {error}") from None
            break
    if not named:
        raise ConfigError(
            f"{key}: '{folder}' has no weights (model.safetensors or pytorch_model.bin, whole or with index)"
        )
    if lost := [file.name for file in named if not file.is_file()]:
        raise ConfigError(f"{key}: '{folder}' lacks {lost[0]}, which its index names: fetch the model again")
    for file, tensors in _headers(folder):
        if file not in named:
            continue
        end = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
        with open(file, "rb") as opened:
            whole = 8 + int.from_bytes(opened.read(8), "little") + end
        if (size := file.stat().st_size) != whole:
            raise ConfigError(f"{key}: {file} has {size:,} bytes instead of {whole:,}: fetch the model again")
        for name, tensor in tensors.items():
            packed = tensor["dtype"] not in FLOATS and name.endswith("weight")
            if packed or tensor["dtype"].startswith(("F8", "F6", "F4")):
                raise ConfigError(_quantised(key, folder, f"{name} is {tensor['dtype']}"))


def _headers(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every safetensors file of a folder with what its header says of its tensors.

    Raises:
        ConfigError: a file has no header.
    """
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with open(file, "rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                header: dict[str, Any] = json.loads(opened.read(min(length, LONGEST_HEADER)))
            header.pop("__metadata__", None)
            if not all("dtype" in tensor and len(tensor["data_offsets"]) == 2 for tensor in header.values()):
                raise ValueError("a tensor without dtype or place")
        except (OSError, ValueError, AttributeError, TypeError, KeyError):
            raise ConfigError(
                f"{file} is no safetensors file: its header cannot be read; fetch the model again"
            ) from None
        yield file, header
