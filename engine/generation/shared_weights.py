"""One storage for the trainer's and the sampler's weights, so that a hand-over moves next to nothing.

vLLM fuses matrices (q, k, v; gate, up) that the trainer has as parameters of their own. Where those lie end to end in
memory, as in ZeRO-1 and 2's flat buffer (see ``zero.parameter_groups``), the fused matrix is a view of them. All
matrices become such views, before CUDA graphs remember their addresses; the optimizer then writes the sampler's weights
in place. Vectors (norms, biases: kilobytes) are copied: a fused bias has its parts apart, and few vectors start at an
address that kernels read fast.
"""

from __future__ import annotations

import importlib
import math
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from engine.generation import vllm_process as process
from engine.generation.vllm_compat import GPU_BUILD, fused_names, patch

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

LOAD_FORMAT = "trainers_own"
ALIGNMENT = 16
"""Bytes that matrix products and compiled kernels want a matrix to be aligned to."""


class SharedWeights:
    """The trained policy's weights for a vLLM engine of the same process to use in place.

    Ask ``fits`` first, then build ``vllm.LLM(..., load_format=shared.register())``, with the trainer's dtype and tensor
    parallel size 1; from then on ``refresh`` is the whole hand-over. vLLM's sleep leaves the matrices alone.

    Args:
        engine: the policy; its ``module.model`` is the transformers model.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        model = engine.module.model
        self._stage = engine.zero_optimization_stage()
        self._kind = type(model).__name__
        self._embeddings = [model.get_input_embeddings(), model.get_output_embeddings()]
        self._parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self._addresses: list[int] = []
        self._model: Any = lambda: None

    def fits(self) -> str | None:
        """Why the weights cannot be shared, or None where they can. Imports vLLM; every rank gives the same answer."""
        if self._stage == 3:
            return "ZeRO-3 keeps only a part of each weight on a GPU"
        if len(dtypes := {parameter.dtype for parameter in self._parameters.values()}) > 1:
            return f"the weights are of several dtypes: {', '.join(sorted(map(str, dtypes)))}"
        if not self._fused:
            return f"vLLM does not say how it fuses the matrices of {self._kind}"
        padding: int = importlib.import_module(
            "vllm.model_executor.layers.vocab_parallel_embedding"
        ).DEFAULT_VOCAB_PADDING_SIZE
        for embedding in self._embeddings:
            if (rows := len(embedding.weight)) % padding:
                return f"vLLM pads the vocabulary of {rows} tokens to a multiple of {padding}"
        if self._stage == 0:  # nobody but the parameters themselves refers to their memory
            return None
        return next(filter(None, (apart(name, parts) for name, parts in self._fused.items())), None)

    @cached_property
    def _fused(self) -> dict[str, list[nn.Parameter]]:
        """As ``fused``; empty for a model that vLLM does not know, or knows in another form."""
        with process.process_kept():
            known = process.import_vllm().ModelRegistry.models.get(self._kind)
            packed = getattr(known.load_model_cls(), "packed_modules_mapping", None) if known else None
        return fused(self._parameters, packed) if packed else {}

    def register(self) -> str:
        """Lets vLLM load these weights; gives the ``load_format`` to ask for.

        Raises:
            ValueError: ``fits`` gives a reason against it.
        """
        if reason := self.fits():
            raise ValueError(f"weights cannot be shared with the sampler: {reason}")
        if self._stage == 0:
            for name, parts in self._fused.items():
                if apart(name, parts):
                    lay_end_to_end(parts)
        self._addresses = [parameter.data_ptr() for parameter in self._parameters.values()]
        loaders: Any = importlib.import_module("vllm.model_executor.model_loader")
        loaders._LOAD_FORMAT_TO_MODEL_LOADER.pop(LOAD_FORMAT, None)  # an earlier engine's, which would raise a warning
        loaders.register_model_loader(LOAD_FORMAT)(_loader(loaders.BaseModelLoader, weakref.ref(self)))
        return LOAD_FORMAT

    def bind(self, model: Any) -> None:
        """Turns the matrices of vLLM's ``model`` into views of the trainer's and copies the vectors.

        vLLM's own loader then runs over all weights and may do no more than copy every matrix onto itself.

        Raises:
            RuntimeError: a matrix does not fit, or vLLM's loader would have it otherwise.
        """
        own = dict(model.named_parameters())
        for name, parts in self._fused.items():
            view, vllms = end_to_end(parts), own.get(name)
            if vllms is None or (vllms.shape, vllms.dtype) != (view.shape, view.dtype):
                what = "no such matrix" if vllms is None else f"{vllms.dtype} {list(vllms.shape)}"
                ours = f"{view.dtype} {list(view.shape)}"
                raise RuntimeError(f"{name}: trainer has {ours}, vLLM {what}: set memory.zero_copy off")
            vllms.data = view
        with _OntoThemselves(self._parameters.values()):
            loaded = model.load_weights((name, parameter.detach()) for name, parameter in self._parameters.items())
        if missing := sorted(own.keys() - loaded):
            raise RuntimeError(f"the trainer has no weights for vLLM's {missing[0]}: set memory.zero_copy off")
        self._model = weakref.ref(model)

    @torch.no_grad()
    def refresh(self) -> None:
        """The hand-over: copies the vectors to the sampler. Call it between optimizer steps, before generating.

        Raises:
            RuntimeError: no living vLLM engine uses the weights, or trainer and sampler no longer share them.
        """
        if (model := self._model()) is None:
            raise RuntimeError("no vLLM engine uses these weights: build it with load_format=shared.register()")
        own = dict(model.named_parameters())
        for name, parts in self._fused.items():
            if own[name].data_ptr() != parts[0].data_ptr():
                raise RuntimeError(
                    f"vLLM no longer uses the trainer's {name} but one of its own: set memory.zero_copy off"
                )
        if [parameter.data_ptr() for parameter in self._parameters.values()] != self._addresses:
            raise RuntimeError(
                "the trainer's weights were moved since vLLM was built on them: set memory.zero_copy off"
            )
        model.load_weights((name, one.detach()) for name, one in self._parameters.items() if one.ndim < 2)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # vLLM samples on a stream of its own


def fused(parameters: dict[str, nn.Parameter], packed: dict[str, list[str]]) -> dict[str, list[nn.Parameter]]:
    """Matrices by vLLM's names, each with the parameters that make up its rows, in order.

    Args:
        parameters: by transformers' names; vectors are left out.
        packed: names of fused modules to those of their parts, as vLLM's models give it.
    """
    matrices = [name for name, parameter in parameters.items() if parameter.ndim > 1]
    return {whole: [parameters[name] for name in names] for whole, names in fused_names(matrices, packed).items()}


def apart(name: str, parts: list[nn.Parameter]) -> str | None:
    """Why the parts do not make up one aligned matrix as they lie in memory, or None where they do."""
    address, storage = parts[0].data_ptr(), parts[0].untyped_storage().data_ptr()
    if address % ALIGNMENT:
        return f"{name} starts at an address that is no multiple of {ALIGNMENT} bytes"
    for part in parts:
        if (part.data_ptr(), part.untyped_storage().data_ptr()) != (address, storage) or not part.is_contiguous():
            return f"the parts of {name} do not lie end to end in DeepSpeed's buffer"
        address += part.nbytes
    return None


def end_to_end(parts: list[nn.Parameter]) -> Tensor:
    """The one matrix that the parts make up in memory, a view."""
    first = parts[0].detach()
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


def lay_end_to_end(parts: list[nn.Parameter]) -> None:
    """Moves the parts into memory of their own where they do."""
    whole = torch.cat([part.detach() for part in parts])
    for part, rows in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = rows


def _loader(base: Any, shared: weakref.ref[SharedWeights]) -> Any:
    class Loader(base):  # type: ignore[misc]
        def download_model(self, model_config: Any) -> None:
            """Nothing to download."""

        def load_model(self, *args: Any, **kwargs: Any) -> Any:
            with matrices_without_memory():
                return super().load_model(*args, **kwargs)

        def load_weights(self, model: Any, model_config: Any) -> None:
            if (weights := shared()) is None:
                raise RuntimeError(f"the trainer of load_format {LOAD_FORMAT!r} is gone: register its weights again")
            weights.bind(model)

    return Loader


@patch(GPU_BUILD, reason="makes its matrices on the GPU before they can be replaced by the trainer's")
@contextmanager
def matrices_without_memory() -> Iterator[None]:
    """Has vLLM make them in host memory that nobody touches, so that they take none."""
    linear: Any = importlib.import_module("vllm.model_executor.layers.linear")
    embedding: Any = importlib.import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    methods = [linear.UnquantizedLinearMethod, embedding.UnquantizedEmbeddingMethod]
    originals = [method.create_weights for method in methods]

    def on_host(create: Any) -> Any:
        def create_weights(*args: Any, **kwargs: Any) -> None:
            with torch.device("cpu"):
                create(*args, **kwargs)

        return create_weights

    for method, original in zip(methods, originals, strict=True):
        method.create_weights = on_host(original)
    try:
        yield
    finally:
        for method, original in zip(methods, originals, strict=True):
            method.create_weights = original


class _OntoThemselves(TorchDispatchMode):
    """Refuses to write to the given parameters' memory. Copying a tensor of it onto itself is left undone."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._schema.is_mutable and self._is_shared(args[0]):
            if function is not torch.ops.aten.copy_.default or _place(args[0]) != _place(args[1]):
                raise RuntimeError(
                    f"vLLM's loader does not take a weight of shape {list(args[0].shape)} as the trainer has it: "
                    "set memory.zero_copy off"
                )
            return args[0]
        return function(*args, **(kwargs or {}))

    def _is_shared(self, tensor: Tensor) -> bool:
        return math.prod(tensor.shape) > 0 and tensor.untyped_storage().data_ptr() in self._storages


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
