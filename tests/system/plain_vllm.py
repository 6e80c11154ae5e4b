"""vLLM without Tandem's patches, on one rank of the CPU: what it does then, as a line of JSON.

Started by test_vllm_patches. Usage: plain_vllm.py MODEL, the folder of a Llama with a tied head or of a GPT-NeoX.
"""

from __future__ import annotations

import gc
import json
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
from transformers import AutoConfig, AutoModelForCausalLM

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
    with vllm_patches.requests_forgotten(llm):  # what comes next needs an engine without any
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


def engine(path: str) -> VLLMGenerator:
    return VLLMGenerator(path, dtype="bfloat16", max_model_len=64, max_num_seqs=8, seed=0, kv_cache_bytes=2**24)


def observe(path: str) -> dict[str, Any]:
    """What an engine does to the process it lives in and with what it is given."""
    model = AutoModelForCausalLM.from_pretrained(path)
    with joined("cpu", 1):
        torch.set_float32_matmul_precision("high")
        environment, threads, states = dict(os.environ), torch.set_num_threads, random_states()
        sampler = engine(path)
        changed = {
            name for name in os.environ.keys() | environment.keys() if os.environ.get(name) != environment.get(name)
        }
        seen = {
            "variables": sorted(changed),
            "matmul precision": torch.get_float32_matmul_precision(),
            "set_num_threads": torch.set_num_threads is threads,
            "frozen": gc.get_freeze_count(),
            "random states at start": random_states() == states,
            "bound": bound(),
            "shared memory": os.environ["VLLM_DIST_IDENT"],
        }

        from vllm import SamplingParams

        llm, states = sampler._llm, random_states()
        params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=0)
        prompts = [{"prompt_token_ids": [1, 5, 9]}, {"prompt_token_ids": [1, 7]}]
        seen["seconds"] = []
        for _ in range(2):
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            seen["seconds"].append(time.perf_counter() - started)
        seen["random states in a call"] = random_states() == states
        seen["requests stay"] = interrupted(llm, prompts, params)
        seen["lost"] = {"spoilt": lost(sampler, model, False), "kept": lost(sampler, model, True)}
        llm.llm_engine.engine_core.shutdown()
        return seen | {"process group": dist.is_initialized()}


def observe_class(path: str) -> dict[str, Any]:
    """What happens to the class of a model that vLLM runs by transformers."""
    with joined("cpu", 1):
        error = ""
        try:
            engine(path)  # which reads the model's layout from its class, as the trainer does
        except AssertionError as raised:
            error = str(raised)
        return {"error": error, "shared memory": os.environ["VLLM_DIST_IDENT"]}


def main(path: str) -> None:
    os.environ.update(SETTINGS)
    take_patches_away()
    kind = AutoConfig.from_pretrained(path).model_type
    seen = observe(path) if kind == "llama" else observe_class(path)
    print(json.dumps(seen), flush=True)
    os._exit(0)  # the process group is gone, which vLLM's own functions at exit do not expect


if __name__ == "__main__":
    main(sys.argv[1])
