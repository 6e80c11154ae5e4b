"""The vLLM sampler against transformers: tokens, log-probabilities, hand-over, and the process it lives in."""

import copy
import gc
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

if __name__ != "__main__":
    pytest.importorskip("vllm")

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

from engine.generation.base import Response, WrongStateError
from engine.generation.equal_weights import HandOverError
from engine.generation.sampling import Request, Sampling
from engine.generation.vllm import VLLMGenerator
from engine.generation.vllm_compat import CPU_BLOCK_SIZE
from engine.machine.world import joined
from engine.memory.planning import MemoryPlan
from engine.schedules.colocation import Colocation
from tests.system.helpers import rank_outputs

VOCABULARY, MAX_LEN, KV_CACHE = 48, 160, 2**26
GREEDY = Sampling(max_tokens=12, temperature=0.0, stop_token_ids=())
WARM = Sampling(max_tokens=12, temperature=0.8, stop_token_ids=())
WARM_PAIR = Sampling(max_tokens=2, temperature=0.8, stop_token_ids=())
PROMPTS = [[1, 5, 9], [1, 7], [1, *range(3, 43)], [1, *range(40, 2, -1), 4, 4, *range(3, 43)]]


def make_model(folder: Path, *, tied: bool = False, seed: int = 0) -> LlamaForCausalLM:
    """A small model with far from uniform predictions, and a generation config that no training may follow."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=MAX_LEN,
        initializer_range=0.15,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.generation_config = GenerationConfig(do_sample=True, top_k=1, top_p=0.1, eos_token_id=list(range(VOCABULARY)))
    model.save_pretrained(folder)
    return model


def build(model_path: str | Path) -> VLLMGenerator:
    return VLLMGenerator(
        str(model_path),
        dtype="float32",
        max_model_len=MAX_LEN,
        max_num_seqs=64,
        seed=0,
        kv_cache_bytes=KV_CACHE,
    )


def perturbed(model: LlamaForCausalLM, seed: int) -> LlamaForCausalLM:
    """A copy with other weights, so far off that hardly a greedy token stays."""
    other = LlamaForCausalLM(model.config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in other.named_parameters():
        if "norm" not in name:
            parameter.normal_(0, 0.2, generator=generator)
    return other


def hand_over(sampler: VLLMGenerator, model: LlamaForCausalLM, version: int = 0) -> None:
    """A full cycle from wherever the sampler is to ``ready`` with the model's weights."""
    if sampler.state == "ready":
        sampler.sleep()
    if sampler.state == "asleep":
        sampler.wake()
    sampler.load_weights(model.named_parameters(), version)
    sampler.start()


def continued(model: LlamaForCausalLM, prompt: list[int], response: list[int], temperature: float) -> torch.Tensor:
    """[len(response), V] log-probabilities by transformers."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1)


def assert_greedy(model: LlamaForCausalLM, prompt: list[int], response: Response) -> None:
    """Each token is transformers' best, with its log-probability at temperature 1."""
    logprobs = continued(model, prompt, response.token_ids, 1.0)
    assert response.token_ids == logprobs.argmax(-1).tolist()
    np.testing.assert_allclose(response.logprobs, logprobs.max(-1).values, atol=1e-4)


def requests(prompts: list[list[int]], first_seed: int = 0) -> list[Request]:
    return [Request(prompt, first_seed + i) for i, prompt in enumerate(prompts)]


def scheduler_of(sampler: VLLMGenerator) -> Any:
    return sampler._llm.llm_engine.engine_core.engine_core.scheduler


def process_state() -> dict[str, object]:
    """What a guest in this process must not change."""
    return {
        "environment": dict(os.environ),
        "affinity": os.sched_getaffinity(0),
        "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads,
        "matmul precision": torch.get_float32_matmul_precision(),
        "default dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "torch": torch.get_rng_state().tolist(),
        "numpy": repr(np.random.get_state()),
        "python": random.getstate(),
        "frozen objects": gc.get_freeze_count(),
        "memory bound to a node": " bind" in Path("/proc/self/numa_maps").read_text(),
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """The module's engine, its model, and the process's state before and after building it."""
    path = tmp_path_factory.mktemp("model")
    model = make_model(path)
    torch.set_float32_matmul_precision("high")
    with ExitStack() as stack:
        stack.enter_context(joined("cpu", 1))
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("VLLM_CPU_KVCACHE_SPACE", "100000")
        before = process_state()
        sampler = build(path)
        yield SimpleNamespace(sampler=sampler, model=model, before=before, after=process_state())
        sampler.close()
    torch.set_float32_matmul_precision("highest")


@pytest.fixture
def model(built: SimpleNamespace) -> LlamaForCausalLM:
    return built.model


@pytest.fixture
def sampler(built: SimpleNamespace) -> Iterator[VLLMGenerator]:
    """The module's engine; afterwards it gets its first weights back."""
    yield built.sampler
    hand_over(built.sampler, built.model)


def test_building_leaves_the_process_as_it_was(built: SimpleNamespace) -> None:
    for what, value in built.before.items():
        assert built.after[what] == value, what


def test_generating_leaves_the_process_as_it_was(sampler: VLLMGenerator) -> None:
    before = process_state()
    sampler.generate(requests(PROMPTS), WARM)
    assert process_state() == before


def test_torch_still_uses_all_its_threads(sampler: VLLMGenerator) -> None:
    if torch.get_num_threads() == 1:
        pytest.skip("one thread only")
    matrix = torch.randn(1500, 1500)
    own, everyones = time.thread_time(), time.process_time()
    for _ in range(5):
        matrix @ matrix
    assert time.process_time() - everyones > 1.5 * (time.thread_time() - own)


def test_greedy_equals_transformers(sampler: VLLMGenerator, model: LlamaForCausalLM) -> None:
    responses = sampler.generate(requests(PROMPTS), GREEDY)
    for prompt, response in zip(PROMPTS, responses, strict=True):
        assert len(response.token_ids) == GREEDY.max_tokens and response.finish_reason == "length"
        assert response.logprobs.dtype == np.float32 and response.logprobs.shape == (GREEDY.max_tokens,)
        assert_greedy(model, prompt, response)


def test_logprobs_are_those_at_the_sampling_temperature(sampler: VLLMGenerator, model: LlamaForCausalLM) -> None:
    for prompt, response in zip(PROMPTS, sampler.generate(requests(PROMPTS), WARM), strict=True):
        logprobs = continued(model, prompt, response.token_ids, WARM.temperature)
        expected = logprobs.gather(-1, torch.tensor(response.token_ids)[:, None])[:, 0]
        np.testing.assert_allclose(response.logprobs, expected, atol=1e-4)


def test_samples_follow_the_whole_distribution(sampler: VLLMGenerator, model: LlamaForCausalLM) -> None:
    """Neither truncated (the model's generation config asks for it) nor at another temperature."""
    count, prompt = 2000, PROMPTS[0]
    drawn = sampler.generate([Request(prompt, seed) for seed in range(count)], Sampling(1, 1.5, ()))
    share = np.bincount([response.token_ids[0] for response in drawn], minlength=VOCABULARY) / count
    expected = continued(model, prompt, [0], 1.5)[0].exp().numpy()
    assert (np.abs(share - expected) <= 4.5 * np.sqrt(expected * (1 - expected) / count) + 1e-3).all()


def test_a_response_depends_on_its_seed_only(sampler: VLLMGenerator) -> None:
    wanted = [Request(PROMPTS[0], 2**63 - 1), Request(PROMPTS[2], 7), Request(PROMPTS[2], 8)]
    alone = [sampler.generate([request], WARM)[0] for request in wanted]
    others = requests(PROMPTS * 8, first_seed=100)
    crowd = sampler.generate([*others[:9], *reversed(wanted), *others[9:]], WARM)[9:12]
    for first, second in zip(alone, reversed(crowd), strict=True):
        assert first.token_ids == second.token_ids
        np.testing.assert_allclose(first.logprobs, second.logprobs, atol=1e-4)
    assert alone[1].token_ids != alone[2].token_ids


def test_more_prompts_than_fit_a_step(sampler: VLLMGenerator) -> None:
    """9600 tokens of prompts; none may be taken in parts, after which a seed would not go on."""
    prompts = [[1 + i % 40, *(3 + (7 * i + j * j) % 45 for j in range(149))] for i in range(64)]
    wanted = requests(prompts)
    together = sampler.generate(wanted, WARM_PAIR)
    for i in (0, 27, 63):
        assert sampler.generate([wanted[i]], WARM_PAIR)[0].token_ids == together[i].token_ids


def test_more_responses_than_the_kv_cache_holds(
    sampler: VLLMGenerator, model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are put back in the queue on the way and computed again."""
    scheduler, put_back = scheduler_of(sampler), []
    preempt, pool = scheduler._preempt_request, scheduler.kv_cache_manager.block_pool
    monkeypatch.setattr(scheduler, "_preempt_request", lambda *a, **k: (put_back.append(1), preempt(*a, **k)))
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 14)
    try:
        prompts = [[1, 3 + i] for i in range(8)]
        responses = sampler.generate(requests(prompts), Sampling(100, 0.0, ()))
    finally:
        pool.free_blocks(taken)
    assert put_back
    for prompt, response in zip(prompts, responses, strict=True):
        assert len(response.token_ids) == 100
        assert_greedy(model, prompt, response)


def test_room_in_the_kv_cache_is_looked_for_once_a_block(
    sampler: VLLMGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, calls = scheduler_of(sampler).kv_cache_manager.coordinator, []
    allocate = coordinator.allocate_new_blocks
    monkeypatch.setattr(coordinator, "allocate_new_blocks", lambda *args: (calls.append(1), allocate(*args))[1])
    sampler.generate(requests(PROMPTS[:3]), Sampling(3 * CPU_BLOCK_SIZE, 0.0, ()))
    assert 3 * 3 <= len(calls) <= 3 * 4


def test_blocks_of_responses_are_found_again(sampler: VLLMGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block that was full when its response ended, save the last: nobody asked for one after it."""
    manager, found = scheduler_of(sampler).kv_cache_manager, []
    look = manager.get_computed_blocks
    response = sampler.generate([Request(PROMPTS[0], 0)], Sampling(3 * CPU_BLOCK_SIZE + 8, 0.0, ()))[0]
    monkeypatch.setattr(manager, "get_computed_blocks", lambda one: (found.append(look(one)), found[-1])[1])
    sampler.generate([Request(PROMPTS[0] + response.token_ids, 0)], WARM_PAIR)
    assert found[0][1] == 3 * CPU_BLOCK_SIZE


@pytest.mark.parametrize(
    "asked, where, calls",
    [("generate", "get_output", 5), ("generate", "add_request", 2)]
    + [("logprobs", "get_output", 0), ("logprobs", "add_request", 2)],
)
def test_an_interruption_leaves_nothing_behind(
    sampler: VLLMGenerator,
    model: LlamaForCausalLM,
    monkeypatch: pytest.MonkeyPatch,
    asked: str,
    where: str,
    calls: int,
) -> None:
    """Neither while requests are given to vLLM nor while it works on them."""
    engine, pool = sampler._llm.llm_engine, scheduler_of(sampler).kv_cache_manager.block_pool
    free, left, real = pool.get_num_free_blocks(), iter(range(calls)), getattr(engine.engine_core, where)

    def interrupted(*args: object) -> object:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return real(*args)

    texts = [(prompt, [5, 6]) for prompt in PROMPTS]
    with monkeypatch.context() as patch:
        patch.setattr(engine.engine_core, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            sampler.logprobs(texts) if asked == "logprobs" else sampler.generate(requests(PROMPTS), GREEDY)
    assert not engine.has_unfinished_requests() and not scheduler_of(sampler).has_unfinished_requests()
    assert pool.get_num_free_blocks() == free
    for prompt, response in zip(PROMPTS, sampler.generate(requests(PROMPTS), GREEDY), strict=True):
        assert_greedy(model, prompt, response)
    for (prompt, response), logprobs in zip(texts, sampler.logprobs(texts), strict=True):
        expected = continued(model, prompt, response, 1.0).gather(-1, torch.tensor(response)[:, None])[:, 0]
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)


def test_a_request_that_vllm_gives_up_is_an_error(sampler: VLLMGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine import FinishReason

    scheduler = scheduler_of(sampler)
    update = scheduler.update_from_output

    def given_up(*args: object) -> object:
        outputs = update(*args)
        for one in outputs[0].outputs[:1]:
            one.new_token_ids, one.new_logprobs, one.finish_reason = [], None, FinishReason.ABORT
        return outputs

    monkeypatch.setattr(scheduler, "update_from_output", given_up)
    with pytest.raises(RuntimeError, match="gave a request up: abort"):
        sampler.generate(requests(PROMPTS[:2]), WARM_PAIR)


def test_samples_of_one_prompt_differ(sampler: VLLMGenerator) -> None:
    responses = sampler.generate([Request(PROMPTS[3], seed) for seed in range(8)], WARM)
    assert len({tuple(response.token_ids) for response in responses}) == 8


def test_stop_token_is_kept_and_the_only_reason_to_stop(sampler: VLLMGenerator) -> None:
    """Every token ends a response by the model's generation config; only the ids asked for may."""
    full = sampler.generate(requests(PROMPTS[:1]), GREEDY)[0]
    assert full.finish_reason == "length"
    stop = full.token_ids[5]
    cut = full.token_ids.index(stop) + 1
    response = sampler.generate(requests(PROMPTS[:1]), Sampling(12, 0.0, (VOCABULARY - 1, stop)))[0]
    assert (response.token_ids, response.finish_reason) == (full.token_ids[:cut], "stop")
    assert len(response.logprobs) == cut


def test_budget_of_one_token(sampler: VLLMGenerator) -> None:
    full = sampler.generate(requests(PROMPTS[:1]), GREEDY)[0]
    for stops, reason in ((), "length"), ((full.token_ids[0],), "stop"):
        response = sampler.generate(requests(PROMPTS[:1]), Sampling(1, 0.0, stops))[0]
        assert (response.token_ids, response.finish_reason) == (full.token_ids[:1], reason)
        assert response.logprobs.shape == (1,)


def test_what_vllm_would_change_is_refused(sampler: VLLMGenerator) -> None:
    with pytest.raises(ValueError, match=r"temperature 0\.001"):
        sampler.generate(requests(PROMPTS), Sampling(4, 0.001, ()))
    with pytest.raises(ValueError, match=f"prompt of {len(PROMPTS[3])} tokens .* max_model_len {MAX_LEN}"):
        sampler.generate(requests(PROMPTS), Sampling(MAX_LEN, 1.0, ()))


def test_new_weights_take_effect_on_a_cached_prompt(sampler: VLLMGenerator, model: LlamaForCausalLM) -> None:
    assert len(PROMPTS[3]) > 2 * CPU_BLOCK_SIZE  # else nothing of it is cached
    before = sampler.generate([Request(PROMPTS[3], 0)] * 2, GREEDY)[1]
    for seed in (1, 2):
        other = perturbed(model, seed)
        hand_over(sampler, other, version=seed)
        after = sampler.generate([Request(PROMPTS[3], 0)] * 2, GREEDY)[1]
        assert sampler.version == seed
        assert after.token_ids != before.token_ids
        assert_greedy(other, PROMPTS[3], after)


def test_a_tensor_is_valid_only_until_the_next(sampler: VLLMGenerator, model: LlamaForCausalLM) -> None:
    """As in the trainer's hand-over, which gathers and releases."""
    other = perturbed(model, 3)

    def released() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in other.named_parameters():
            tensor = parameter.clone()
            yield name, tensor
            tensor.fill_(torch.nan)

    sampler.sleep()
    sampler.wake()
    sampler.load_weights(released(), 1)
    sampler.start()
    assert_greedy(other, PROMPTS[0], sampler.generate(requests(PROMPTS), GREEDY)[0])


def test_prefix_cache_that_cannot_be_reset_is_an_error(
    sampler: VLLMGenerator, model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(type(sampler._llm), "reset_prefix_cache", lambda self: False)
        with pytest.raises(RuntimeError, match="prefix cache"):
            hand_over(sampler, model)
    assert sampler.state == "weights"


def test_calls_in_the_wrong_state_raise(sampler: VLLMGenerator, model: LlamaForCausalLM) -> None:
    calls = {
        "generate": lambda: sampler.generate(requests(PROMPTS), GREEDY),
        "sleep": sampler.sleep,
        "wake": sampler.wake,
        "load_weights": lambda: sampler.load_weights(model.named_parameters(), 0),
        "start": sampler.start,
    }
    allowed = {"ready": {"generate", "sleep"}, "asleep": {"wake"}, "weights": {"load_weights", "start"}}
    for state, names in allowed.items():
        if state != "ready":
            {"asleep": sampler.sleep, "weights": sampler.wake}[state]()
        for name in calls.keys() - names:
            with pytest.raises(WrongStateError, match=rf"{name}\(\).*'{state}'"):
                calls[name]()
    with pytest.raises(WrongStateError, match="without its weights"):
        sampler.start()


@pytest.mark.parametrize(
    ("name", "replacement", "message"),
    [
        ("model.layers.1.self_attn.k_proj.weight", [], "k_proj.weight is missing"),
        ("model.layers.0.mlp.up_proj.weight", [("model.layers.0.mlp.up_proj.weight", torch.empty(0))], r"shape \(0,\)"),
        ("lm_head.weight", [("head.weight", torch.ones(VOCABULARY, 64))], "head.weight has .*no such"),
    ],
)
def test_weights_that_do_not_fit_are_an_error(
    sampler: VLLMGenerator, model: LlamaForCausalLM, name: str, replacement: list, message: str
) -> None:
    other = perturbed(model, 4)
    weights = {key: value for key, value in other.named_parameters() if key != name}
    sampler.sleep()
    sampler.wake()
    with pytest.raises(ValueError, match=message):
        sampler.load_weights([*weights.items(), *replacement], 1)
    with pytest.raises(WrongStateError):
        sampler.start()
    hand_over(sampler, other)  # and a whole set afterwards is taken whole
    assert_greedy(other, PROMPTS[0], sampler.generate(requests(PROMPTS), GREEDY)[0])


def test_a_hand_over_that_breaks_off_can_be_repeated(sampler: VLLMGenerator, model: LlamaForCausalLM) -> None:
    def breaks_off() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(model.named_parameters())[:3]
        raise OSError("gather failed")

    sampler.sleep()
    sampler.wake()
    with pytest.raises(OSError, match="gather failed"):
        sampler.load_weights(breaks_off(), 1)
    other = perturbed(model, 5)
    hand_over(sampler, other)
    assert_greedy(other, PROMPTS[0], sampler.generate(requests(PROMPTS), GREEDY)[0])


@pytest.mark.parametrize("corrupt", [None, "model.layers.1.mlp.down_proj.weight"])
def test_proof_of_the_turn_notices_one_wrong_tensor(
    sampler: VLLMGenerator, model: LlamaForCausalLM, corrupt: str | None
) -> None:
    """The tensor loaded for it has the right shape and the wrong numbers."""
    hand_over(sampler, model)
    trained = copy.deepcopy(model)
    if corrupt:
        trained.get_parameter(corrupt).neg_()
    with nullcontext() if corrupt is None else pytest.raises(HandOverError, match="became"):
        Colocation(
            SimpleNamespace(max=float),
            MemoryPlan("kv", False, False, KV_CACHE),
            lambda: pytest.fail("nothing is shared"),
            PROMPTS,
            tokens=16,
            source=None,
            build_generator=lambda plan, shared: sampler,
            build_trainer=lambda: SimpleNamespace(policy=SimpleNamespace(module=SimpleNamespace(**named(trained)))),
            say=print,
        )


def named(model: LlamaForCausalLM) -> dict[str, object]:
    return {"named_parameters": lambda: ((f"model.{name}", value) for name, value in model.named_parameters())}


def test_what_construction_needs(built: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "vllm", None)
        with pytest.raises(ImportError, match="make setup"):
            build(tmp_path)
    with pytest.raises(ValueError, match="tensor_parallel 2"):
        VLLMGenerator(
            str(tmp_path),
            dtype="float32",
            max_model_len=8,
            max_num_seqs=1,
            seed=0,
            kv_cache_bytes=KV_CACHE,
            tensor_parallel=2,
        )
    with monkeypatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: False)
        with pytest.raises(RuntimeError, match="joined"):
            build(tmp_path)


@pytest.mark.slow
def test_two_ranks_are_replicas(tmp_path: Path) -> None:
    """Each with its own requests and its own number of calls; tied heads; built twice in a process."""
    tied = make_model(tmp_path / "tied", tied=True)
    shutil.copytree(tmp_path / "tied", tmp_path / "with_head")  # as some checkpoints are: tied, with a copy of the head
    weights = {name: tensor.clone() for name, tensor in tied.state_dict().items()}
    save_file(weights, tmp_path / "with_head" / "model.safetensors", metadata={"format": "pt"})
    outputs = rank_outputs(2, __file__, str(tmp_path / "tied"), str(tmp_path / "with_head"), timeout=120)
    for r, output in enumerate(outputs):
        assert f"rank {r} of 2 is done" in output
        assert "WARNING" not in output and "Error" not in output, output


def one_of_two_ranks(paths: list[str]) -> None:
    """What each process of the two-rank test does."""
    for path in paths:
        model = AutoModelForCausalLM.from_pretrained(path).requires_grad_(False)
        with joined("cpu", 1) as world:
            before = process_state()
            sampler = build(path)
            assert process_state() == before
            for call in range(3 if world.main else 1):
                mine = PROMPTS[call + world.rank]
                assert_greedy(model, mine, sampler.generate(requests([mine]), GREEDY)[0])
            other = perturbed(model, seed=1)
            hand_over(sampler, other)
            for prompt, response in zip(PROMPTS, sampler.generate(requests(PROMPTS), GREEDY), strict=True):
                assert_greedy(other, prompt, response)
            sampler.close()
            del sampler
            gc.collect()
            assert world.sum(torch.ones(1)) == 2  # the process group outlives the engine
    print(f"rank {world.rank} of {world.size} is done")


if __name__ == "__main__":
    one_of_two_ranks(sys.argv[1:])
