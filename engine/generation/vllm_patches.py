"""Where vLLM's engine does something slowly, by halves or not at all: sleep, hand-over and scheduling."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from engine.generation.base import NamedTensors
from engine.generation.vllm_compat import CPU_BUILD, GPU_BUILD, as_named_in, on_cpu, patch


@patch(GPU_BUILD, reason="shows a bar while it captures CUDA graphs: hundreds of lines where output is no terminal")
def capture_without_bar() -> None:
    """Leaves the bar out."""
    if not on_cpu():
        graphs: Any = importlib.import_module("vllm.v1.worker.gpu.cudagraph_utils")
        graphs.tqdm = lambda items, **_: items


@patch(GPU_BUILD, reason="puts weights and KV cache to sleep together")
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


@patch(GPU_BUILD, reason="fails half-way where memory is short, and leaks what it has taken")
def wake_up(llm: Any, tag: str) -> None:
    """Gives the engine's ``"weights"`` or its ``"kv_cache"`` their memory back.

    Raises:
        RuntimeError: there is not enough; nothing has been taken.
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


def load_weights(llm: Any, weights: NamedTensors) -> None:
    """Writes ``weights`` into the engine's model. A tensor may change as soon as the next one is asked for."""
    if on_cpu():
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": copied(weights)})
        llm.apply_model(repack_tied_head)
    else:
        import torch

        llm.apply_model(lambda model: model.load_weights(as_named_in(model, weights)))
        torch.cuda.synchronize()  # vLLM samples on a stream of its own


@patch(CPU_BUILD, reason="holds on to a layer's tensors until the last of them has come, and repacks them then")
def copied(weights: NamedTensors) -> NamedTensors:
    """The same in memory of their own."""
    return ((name, tensor.clone()) for name, tensor in weights)


@patch(CPU_BUILD, reason="leaves the packed copy of a head that is tied to the embedding as it was before a reload")
def repack_tied_head(model: Any) -> None:
    """Packs it again: such a head gets no tensor of its own."""
    embeddings = importlib.import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    for module in model.modules():
        if isinstance(module, embeddings.ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


@patch(GPU_BUILD, CPU_BUILD, reason="keeps the requests of a call that was interrupted")
@contextmanager
def requests_forgotten(llm: Any) -> Iterator[None]:
    """Leaves the engine without requests, whatever ended in here: one that stays would be in the next call's way."""
    try:
        yield
    finally:
        processor, core = llm.llm_engine.output_processor, llm.llm_engine.engine_core
        core.abort_requests(processor.abort_requests(list(processor.request_states), internal=True))


@patch(GPU_BUILD, CPU_BUILD, reason="looks for room in the KV cache at every token of every response")
def look_up_blocks_once(llm: Any) -> None:
    """Has vLLM's scheduler look, for speed, when a response reaches a new block only.

    A token inside a block has room there, and full blocks are put into the prefix cache with the next one.
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


@patch(
    CPU_BUILD, reason="compiles, for seconds in the first call, what counts a sampled token's rank, which is not read"
)
def count_ranks_uncompiled() -> None:
    """Counts without compiling."""
    if on_cpu():
        sampler: Any = importlib.import_module("vllm.v1.sample.sampler")
        sampler.batched_count_greater_than = inspect.unwrap(sampler.batched_count_greater_than)
