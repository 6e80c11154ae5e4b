"""vLLM without Tandem's patches, on one rank of the CPU: what it does then, as a line of JSON.

Started by test_vllm_patches. Usage: plain_vllm.py MODEL, the folder of a Llama with a tied head or of a GPT-NeoX.
"""

from __future__ import annotations

import gc
import inspect
import json
import logging
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from engine.generation import vllm_patches, vllm_process
from engine.generation.vllm import VLLMGenerator
from engine.machine.world import joined

SETTINGS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


def take_patches_away() -> None:
    """Every function that changes vLLM does nothing from here on."""
    for name in ("random_state_kept", "process_kept", "model_classes_kept"):
        setattr(vllm_process, name, nullcontext)
    for name in ("mute_harmless_warnings", "leave_memory_unbound", "name_shared_memory", "keep_process_group"):
        setattr(vllm_process, name, lambda: None)
    vllm_patches.count_ranks_uncompiled = lambda: None
    vllm_patches.look_up_blocks_once = lambda llm: None
    vllm_patches.copied = lambda weights: weights
    vllm_patches.repack_tied_head = lambda model: None


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.seen: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append((record.name, record.getMessage()))


def random_states() -> list[str]:
    return [repr(torch.get_rng_state().tolist()), repr(np.random.get_state()), repr(random.getstate())]


def bound() -> bool:
    with open("/proc/self/numa_maps") as maps:
        return " bind" in maps.read()


def interrupted(llm: Any, prompts: Any, params: Any) -> bool:
    """Whether requests stay where a call is interrupted."""
    core = llm.llm_engine.engine_core
    real, left = core.get_output, iter(range(2))

    def get_output() -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return real()

    core.get_output = get_output
    with suppress(KeyboardInterrupt):
        llm.generate(prompts, params, use_tqdm=False)
    del core.get_output
    stay = bool(llm.llm_engine.has_unfinished_requests())
    core.abort_requests(llm.llm_engine.output_processor.abort_requests(list(
        llm.llm_engine.output_processor.request_states), internal=True))
    return stay


def lost(sampler: VLLMGenerator, model: Any, keep: bool) -> list[str]:
    """Tensors that the sampler does not hold after a hand-over of other weights.

    Args:
        keep: the tensors stay as they are; else each is spoilt as soon as the next one is asked for.
    """

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in model.named_parameters():
            tensor = parameter.detach() * 1.5
            yield name, tensor
            if not keep:
                tensor.zero_()

    sampler.renew(weights(), 1)
    assert sampler.receipt
    return sampler.receipt.lost


def main(path: str) -> None:
    warned, seen = Warnings(), {}
    logging.getLogger("vllm").addHandler(warned)
    os.environ.update(SETTINGS)
    model = AutoModelForCausalLM.from_pretrained(path)
    take_patches_away()
    dist_ended = False
    try:
        with joined("cpu", 1):
            torch.set_float32_matmul_precision("high")
            environment, threads, states = dict(os.environ), torch.set_num_threads, random_states()
            precision = torch.get_float32_matmul_precision()
            sampler = VLLMGenerator(
                path, dtype="bfloat16", max_model_len=64, max_num_seqs=8, seed=0, kv_cache_bytes=2**24
            )
            seen["environment"] = sorted(
                name for name in os.environ.keys() | environment.keys() if os.environ.get(name) != environment.get(name)
            )
            seen["matmul precision"] = torch.get_float32_matmul_precision() != precision
            seen["set_num_threads"] = torch.set_num_threads is not threads
            seen["frozen"] = gc.get_freeze_count()
            seen["random states at start"] = random_states() != states
            seen["bound"] = bound()
            seen["shared memory"] = os.environ.get("VLLM_DIST_IDENT")
            seen["bases"] = [base.__name__ for base in type(model.base_model).__bases__]

            import vllm
            from vllm.v1.sample import sampler as vllms_sampler

            llm, states = sampler._llm, random_states()
            params = vllm.SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=0)
            prompts = [{"prompt_token_ids": [1, 5, 9]}, {"prompt_token_ids": [1, 7]}]
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            first = time.perf_counter() - started
            llm.generate(prompts, params, use_tqdm=False)
            seen["seconds"] = [first, time.perf_counter() - started - first]
            seen["random states in a call"] = random_states() != states
            count = vllms_sampler.batched_count_greater_than
            seen["ranks compiled"] = inspect.unwrap(count) is not count
            seen["requests stay"] = interrupted(llm, prompts, params)
            seen["lost"] = {"spoilt": lost(sampler, model, False), "kept": lost(sampler, model, True)}
            llm.llm_engine.engine_core.shutdown()
            dist_ended = not dist.is_initialized()
    except Exception as error:
        seen["error"] = repr(error)
        if not dist_ended:
            raise
    seen["process group ended"] = dist_ended
    seen["warnings"] = warned.seen
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
