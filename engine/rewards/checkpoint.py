"""What a model folder's weights are called and how large they are, without loading them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from engine.config import ConfigError

Shape = tuple[int, ...]


def shapes(path: str, key: str) -> dict[str, Shape]:
    """Name and shape of every tensor of a Hugging Face folder or hub name.

    Reads the headers of ``.safetensors`` files (https://huggingface.co/docs/safetensors, "Format"), else PyTorch's own
    files as views. Of a hub name the files are fetched, as loading it would.

    Args:
        key: the setting that named it, for messages.

    Raises:
        ConfigError: there are no weights, or they cannot be read.
    """
    for name, read in (("model.safetensors", _safetensors), ("pytorch_model.bin", _pytorch)):
        index = locate(path, f"{name}.index.json")
        try:
            if index is not None:
                parts = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            else:
                parts = [name]
            files = [file for part in parts if (file := locate(path, part)) is not None]
            if index is not None and len(files) < len(parts):
                raise ConfigError(f"{key}: {index.name} names files that are not there")
            if files:
                return {tensor: shape for file in files for tensor, shape in read(file).items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, struct.error) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{key}: its weights cannot be read: {' '.join(str(error).split())}") from error
    raise ConfigError(f"{key} has no weights: neither model.safetensors nor pytorch_model.bin")


def locate(path: str, name: str) -> Path | None:
    """A file of a Hugging Face folder or hub name; None if there is none."""
    if Path(path).is_dir():
        file = Path(path) / name
        return file if file.is_file() else None
    from transformers.utils import cached_file

    found = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def _safetensors(file: Path) -> dict[str, Shape]:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > file.stat().st_size:
            raise ValueError(f"{file.name} is torn")
        header = json.loads(stream.read(length))
    return {name: tuple(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"}


def _pytorch(file: Path) -> dict[str, Shape]:
    import torch

    tensors: dict[str, Any] = torch.load(file, map_location="meta", weights_only=True)
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
