"""Where transformers' tensors lie in vLLM's model, and their digests as they lie there.

vLLM fuses matrices, pads vocabularies, cuts out a tensor-parallel rank's part and, on a CPU, keeps its matrices only as
its products want them. All that a digest does not mind, or it can be undone by reading some rows alone or by adding the
ranks' digests. A repacked matrix is read by multiplying the identity with it. What is laid out in another way still is
not read: its name is in ``unread``.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.generation import vllm_compat as compat
from engine.generation.equal_weights import Held
from engine.models.digest import digest

IDENTITY_ROWS = 256
"""Rows of the identity that a repacked matrix is multiplied with at a time."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """A transformers' tensor as rows of a parameter of vLLM's."""

    name: str
    start: int = 0
    rows: int | None = None
    """None: the whole parameter, whatever the order of its elements."""
    cut: bool = False
    """Each tensor-parallel rank holds a share of it."""


@dataclass(slots=True)
class _Place:
    """A parameter of vLLM's."""

    name: str
    module: Any
    leaf: str
    dtype: torch.dtype
    parts: list[_Part] = field(default_factory=list)
    plain: bool = True
    """The parameter itself is there to be read."""
    packed: bool = False
    """Its module computes with a repacked copy."""

    @property
    def parameter(self) -> Tensor:
        tensor: Tensor = getattr(self.module, self.leaf)
        return tensor.detach()


class HeldWeights:
    """What lies in an engine's model.

    Args:
        llm: the engine.
        shapes: of the tensors that it is handed, by transformers' names; a tied one once.
        ranks: that hold the engine together.
    """

    def __init__(self, llm: Any, shapes: dict[str, Shape], ranks: int) -> None:
        self._llm, self._ranks, self._on_cpu = llm, ranks, compat.on_cpu()
        self._places: list[_Place] = []
        llm.apply_model(lambda model: self._places.extend(_places(model, shapes, ranks)))
        self._dtypes = {part.name: place.dtype for place in self._places for part in place.parts}
        self.unread = [name for name in shapes if name not in self._dtypes]
        """Names of tensors that cannot be read back."""

    def as_held(self, name: str, tensor: Tensor) -> Tensor | None:
        """The tensor with the numbers that ``digests`` is to find; None for one that is not read."""
        if (dtype := self._dtypes.get(name)) is None:
            return None
        return self._plain(tensor.to(dtype))

    @torch.no_grad()
    def digests(self, names: set[str]) -> Held:
        """Of the copies that the engine holds of these tensors. Collective over the ranks that hold it together.

        A tensor is left out whose repacked copy gives numbers that are none.
        """
        whole: list[tuple[str, Tensor]] = []
        cut: list[tuple[str, Tensor]] = []
        spoilt: set[str] = set()
        for place in self._places:
            if not any(part.name in names for part in place.parts):
                continue
            if place.plain:
                for part in place.parts:
                    (cut if part.cut else whole).append((part.name, digest(self._plain(_rows(place.parameter, part)))))
            if place.packed:
                sums = [torch.zeros((), dtype=torch.int64) for _ in place.parts]
                for columns in _unpacked(place):
                    if not columns.isfinite().all():
                        spoilt |= {part.name for part in place.parts}
                    for total, part in zip(sums, place.parts, strict=True):
                        total += digest(self._plain(_rows(columns.T, part)))
                for total, part in zip(sums, place.parts, strict=True):
                    (cut if part.cut else whole).append((part.name, total))
        if cut:
            together = compat.sum_over_group(torch.stack([one for _, one in cut]))
            whole += zip([name for name, _ in cut], together.unbind(), strict=True)
        held: Held = {}
        for name, value in whole:
            if name in names and name not in spoilt:
                held.setdefault(name, []).append(value)
        return held

    def _plain(self, tensor: Tensor) -> Tensor:
        """On a CPU without what a multiplication loses: the sign of zero, and numbers that are not normal."""
        if not self._on_cpu:
            return tensor
        return torch.where(tensor.abs() < torch.finfo(tensor.dtype).tiny, 0, tensor)


def _places(model: Any, shapes: dict[str, Shape], ranks: int) -> list[_Place]:
    own = dict(model.named_parameters())
    fuses = getattr(model, "packed_modules_mapping", None) or {}
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    fused: dict[str, list[str]] = {}
    for name, names in compat.fused_names(shapes, fuses).items():
        key = compat.name_in(model, name)
        if key not in own and mapper:
            key = mapper._map_name(key) or key
        fused[key] = names

    embeddings: Any = importlib.import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    modules = dict(model.named_modules())
    heads = [module for module in modules.values() if isinstance(module, embeddings.ParallelLMHead)]
    places: list[_Place] = []
    for key, names in fused.items():
        owner, _, leaf = key.rpartition(".")
        module: Any = modules.get(owner)
        parameter = own.get(key)
        if module is None or parameter is None:
            continue
        plain = parameter.numel() > 0
        packed = leaf == "weight" and hasattr(module, "cpu_linear")
        if not plain and not packed:
            continue
        if heads and isinstance(module, embeddings.VocabParallelEmbedding) and module not in heads:
            packed = False  # nobody multiplies by it
        shape = tuple(parameter.shape) if plain else (module.output_size_per_partition, module.input_size_per_partition)
        if parts := _parts({name: shapes[name] for name in names}, shape, ranks, module):
            places.append(_Place(key, module, leaf, parameter.dtype, parts, plain, packed))
    # A head that is tied to the embedding has no parameter of its own, but on a CPU a repacked copy.
    owners = {id(getattr(place.module, place.leaf)): place for place in places}
    for head in heads:
        tied = owners.get(id(head.weight))
        if hasattr(head, "cpu_linear") and tied and tied.module is not head:
            places.append(_Place(tied.name, head, "weight", tied.dtype, tied.parts, plain=False, packed=True))
    return places


def _parts(shapes: dict[str, Shape], held: Shape, ranks: int, module: Any) -> list[_Part]:
    """The tensors of these shapes, which make up a parameter, in this rank's share of it; none if that is not known."""
    rows, rest = [shape[0] for shape in shapes.values()], {shape[1:] for shape in shapes.values()}
    starts = [sum(rows[:i]) for i in range(len(rows))]
    if rest == {held[1:]}:
        if sum(rows) == held[0]:
            return [_Part(*one) for one in zip(shapes, starts, rows, strict=True)]
        if sum(rows) == held[0] * ranks and not any(count % ranks for count in rows):
            return [
                _Part(name, start // ranks, count // ranks, cut=True)
                for name, start, count in zip(shapes, starts, rows, strict=True)
            ]
    if len(shapes) > 1:
        return []
    (name, shape), size = next(iter(shapes.items())), math.prod(held)
    vocabulary = getattr(module, "shard_indices", None)
    if vocabulary is not None and held[1:] == shape[1:] and held[0] * ranks >= shape[0]:
        return [_Part(name, 0, vocabulary.num_org_elements, cut=ranks > 1)]
    if size == math.prod(shape):
        return [_Part(name)]
    return [_Part(name, cut=True)] if size * ranks == math.prod(shape) else []


def _rows(tensor: Tensor, part: _Part) -> Tensor:
    return tensor if part.rows is None else tensor.narrow(0, part.start, part.rows)


def _unpacked(place: _Place) -> Iterator[Tensor]:
    """The matrix [out, in] that a module computes with, transposed, some rows [n, out] at a time."""
    module = place.module
    width = getattr(module, "input_size_per_partition", None) or module.embedding_dim
    for start in range(0, width, IDENTITY_ROWS):
        count = min(IDENTITY_ROWS, width - start)
        identity = torch.zeros(count, width, dtype=place.dtype)
        identity[:, start : start + count].fill_diagonal_(1)
        yield module.cpu_linear(identity, module.weight, None)
