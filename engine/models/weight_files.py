"""What the headers of a model folder's weights tell, without loading the weights, and mostly without torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.config import ConfigError
from engine.config.quoted import words

WHOLE = ("model.safetensors", "pytorch_model.bin")
"""Weights in one file; in several, an index of the same name and ``.index.json`` lists them."""
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Numbers that can be trained, by safetensors' names."""
LONGEST_HEADER = 100_000_000
"""Bytes; safetensors itself takes none that is longer."""

Shape = tuple[int, ...]
Header = dict[str, dict[str, Any]]
"""Of each tensor by its name: ``dtype``, ``shape``, and ``data_offsets``, bytes counted from the header's end."""


def header(file: Path) -> Header:
    """What a safetensors file says of its tensors (https://huggingface.co/docs/safetensors, "Format").

    Raises:
        ConfigError: it has no header that can be read; names the file.
    """
    try:
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            tensors: Header = json.loads(opened.read(min(length, LONGEST_HEADER)))
        tensors.pop("__metadata__", None)
        for tensor in tensors.values():
            if not ("dtype" in tensor and "shape" in tensor and len(tensor["data_offsets"]) == 2):
                raise ValueError("a tensor without dtype, shape or place")
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        raise ConfigError(f"{file} is no safetensors file: its header cannot be read; fetch the model again") from None
    return tensors


def headers(folder: Path) -> Iterator[tuple[Path, Header]]:
    """Every safetensors file of a folder with its header.

    Raises:
        ConfigError: a file has no header.
    """
    for file in sorted(folder.glob("*.safetensors")):
        yield file, header(file)


def shapes(path: str, key: str) -> dict[str, Shape]:
    """Name and shape of every tensor of a Hugging Face folder or hub name.

    By the headers of its safetensors files, else by PyTorch's own files as views. Of a hub name the files are fetched,
    as loading it would.

    Args:
        key: the setting that named it, for messages.

    Raises:
        ConfigError: there are no weights, or they cannot be read.
    """
    for name in WHOLE:
        index = locate(path, f"{name}.index.json")
        try:
            listed = [name] if index is None else _listed(index)
            files = [file for one in listed if (file := locate(path, one)) is not None]
            if index is not None and len(files) < len(listed):
                raise ConfigError(f"{key}: {index.name} names files that are not there")
            if files:
                return {tensor: shape for file in files for tensor, shape in _shapes(file).items()}
        except ConfigError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise ConfigError(f"{key}: its weights cannot be read: {words(error)}") from error
    raise ConfigError(f"{key} has no weights: neither {' nor '.join(WHOLE)}")


def _shapes(file: Path) -> dict[str, Shape]:
    if file.suffix == ".safetensors":
        return {name: tuple(tensor["shape"]) for name, tensor in header(file).items()}
    import torch

    tensors: dict[str, Any] = torch.load(file, map_location="meta", weights_only=True)
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def locate(path: str, name: str, unreachable_is_absent: bool = False) -> Path | None:
    """A file of a Hugging Face folder or hub name; None if there is none.

    Args:
        unreachable_is_absent: a file that is not in the cache, of a hub that cannot be asked, is not there either.

    Raises:
        OSError: the hub has no such model, or cannot be asked.
    """
    if Path(path).is_dir():
        file = Path(path) / name
        return file if file.is_file() else None
    from transformers.utils import cached_file

    cached = cached_file(
        path,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=not unreachable_is_absent,
    )
    return Path(cached) if cached is not None and Path(cached).is_file() else None


def dtype(path: str) -> str | None:
    """The numbers that most of a local folder's weights are in, as torch calls them; None where its files don't say."""
    counts: Counter[str] = Counter()
    for _, tensors in headers(Path(path)):
        for tensor in tensors.values():
            begin, end = tensor["data_offsets"]
            counts[tensor["dtype"]] += end - begin
    return FLOATS.get(counts.most_common(1)[0][0]) if counts else None


def check(key: str, folder: Path) -> None:
    """Checks that a folder's weights are there, whole, and can be trained.

    Raises:
        ConfigError: they are quantised, absent or torn.
    """
    named = [folder / name for name in WHOLE if (folder / name).is_file()]
    for index in (folder / f"{name}.index.json" for name in WHOLE):
        if index.is_file():
            try:
                named += [folder / name for name in _listed(index)]
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise ConfigError(f"{key}: {index} is no index of weights: {error}") from None
            break
    if not named:
        raise ConfigError(
            f"{key}: '{folder}' has no weights (model.safetensors or pytorch_model.bin, whole or with index)"
        )
    if lost := [file.name for file in named if not file.is_file()]:
        raise ConfigError(f"{key}: '{folder}' lacks {lost[0]}, which its index names: fetch the model again")
    for file, tensors in headers(folder):
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
                raise ConfigError(quantised(key, folder, f"{name} is {tensor['dtype']}"))


def quantised(key: str, path: str | Path, method: str) -> str:
    """The message for a quantised model."""
    return f"{key}: '{path}' is quantised ({method}) and cannot be trained: take the model in bfloat16 or float32"


def _listed(index: Path) -> list[str]:
    """The files that an index of weights names."""
    return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
