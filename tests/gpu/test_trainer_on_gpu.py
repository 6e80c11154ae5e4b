"""What the trainer does on a GPU alone: variable-length attention, Liger's kernels, pinned host memory."""

from __future__ import annotations

import copy
import gc
import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.machine.world import World, joined
from engine.training import attention, liger, models, residual, weights
from engine.training.packing import Layout, microbatches
from tests.system import gradients, offloading
from tests.system.helpers import ROOT

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def no_leftovers() -> None:
    """What earlier tests dropped is gone before memory is measured."""
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with joined("cuda", 5) as alone:
        yield alone


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_qwen(tmp_path_factory.mktemp("qwen"), 2, torch.float32)


def save_qwen(folder: Path, layers: int, dtype: torch.dtype) -> str:
    """Layers of Qwen2 (biases, grouped heads) with distributions that are not flat."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": layers, "vocab_size": 1000}
    model = Qwen2ForCausalLM(Qwen2Config(num_attention_heads=4, num_key_value_heads=2, **shape))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3) if parameter.ndim == 2 else parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder)
    return str(folder)


LENGTHS = (1, 300, 17, 64, 2)


def layout() -> Layout:
    lengths = torch.tensor(LENGTHS, device="cuda")
    ends, longest = lengths.cumsum(0), max(LENGTHS)
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS), device="cuda"), lengths)
    place = torch.arange(int(ends[-1]), device="cuda") - (ends - lengths)[sequence]
    return Layout(torch.cat([ends.new_zeros(1), ends]).int(), longest, sequence * longest + place)


def one_at_a_time(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """[1, heads, N, D] in fp64, a whole score matrix for each sequence."""
    parts = []
    for query, key, value in zip(*(states.double().split(LENGTHS, dim=2) for states in (q, k, v)), strict=True):
        repeat = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        scores = query @ key.transpose(-1, -2) * scale
        distance = torch.arange(scores.shape[-1], device="cuda")
        distance = distance[:, None] - distance[None]
        hidden = (distance < 0) | (distance >= (window or math.inf))
        parts.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ value)
    return torch.cat(parts, 2).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("heads, width, scale", [((8, 8), 64, None), ((8, 2), 128, None), ((6, 2), 80, 0.3)])
def test_packed_attention_is_attention_inside_each_sequence(
    dtype: torch.dtype, heads: tuple[int, int], width: int, scale: float | None
) -> None:
    """Outputs and gradients against fp64, grouped heads and the model's own scale; fp32 takes the other path."""
    torch.manual_seed(0)
    count = sum(LENGTHS)
    shapes = ((1, heads[0], count, width), (1, heads[1], count, width), (1, heads[1], count, width))
    inputs = [torch.randn(*shape, device="cuda").to(dtype).requires_grad_() for shape in shapes]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    assert attention.has_kernel(inputs[0]) == (dtype != torch.float32)
    out, _ = attention.packed_attention(None, *inputs, None, packed=layout(), scaling=scale)
    expected = one_at_a_time(*exact, scale or width**-0.5, None)
    upstream = torch.randn_like(expected)
    out.backward(upstream.to(dtype))
    expected.backward(upstream)
    tolerance = {torch.bfloat16: 2.5e-2, torch.float16: 4e-3, torch.float32: 1e-4}[dtype]
    for got, want in zip([out, *(i.grad for i in inputs)], [expected, *(e.grad for e in exact)], strict=True):
        assert float((got.double() - want).norm() / want.norm()) < tolerance


@pytest.mark.parametrize("window", [1, 16, 400])
def test_sliding_window_counts_the_token_itself(window: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, sum(LENGTHS), 64, device="cuda").bfloat16() for _ in range(3))
    out, _ = attention.packed_attention(None, q, k, v, None, packed=layout(), sliding_window=window)
    expected = one_at_a_time(q, k, v, 0.125, window)
    assert float((out.double() - expected).norm() / expected.norm()) < 1e-2


def test_attention_waits_for_nothing() -> None:
    """No host synchronisation between the layers."""
    q, k, v = (torch.randn(1, 4, sum(LENGTHS), 64, device="cuda").bfloat16() for _ in range(3))
    packed = layout()
    attention.packed_attention(None, q, k, v, None, packed=packed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention.packed_attention(None, q, k, v, None, packed=packed)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_packed_logprobs_equal_one_sequence_at_a_time(qwen: str, world: World) -> None:
    """bf16 through the kernel and Liger, packed, against transformers' own eager attention in fp32."""
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(qwen, attn_implementation="eager").cuda()
    samples = gradients.batch()
    policy = models.load_policy(qwen, dtype=torch.bfloat16).cuda()
    assert not liger.patch(policy.model) or residual.patch(policy.model)
    (micro,) = microbatches(samples, torch.arange(len(samples))[:, None], 1000, world)
    with torch.no_grad():
        packed = policy(micro).split(micro.cu_seqlens.diff().tolist())
        for i, got in zip(micro.indices, packed, strict=True):
            one = samples[i]
            ids = torch.tensor([one.prompt_ids + one.response_ids], device="cuda")
            logits = oracle(ids).logits[0, len(one.prompt_ids) - 1 : -1].log_softmax(-1)
            want = logits.gather(-1, torch.tensor(one.response_ids, device="cuda")[:, None])[:, 0]
            assert float((got - want).abs().mean()) < 0.05, "bf16's rounding, and no more"


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="Liger is not installed")
def test_liger_changes_one_model_and_not_its_numbers(qwen: str, world: World) -> None:
    """The same log-probabilities and gradients in fp32; no other model of the kind is touched."""
    from transformers.models.qwen2 import modeling_qwen2

    plain = models.load_policy(qwen, gradient_checkpointing=True).cuda().train()
    patched = copy.deepcopy(plain)
    before = dict(vars(modeling_qwen2))
    assert liger.patch(patched.model)
    assert vars(modeling_qwen2) == before
    own = [type(m).__name__ for m in patched.modules() if "forward" in vars(m)]
    assert {"Qwen2RMSNorm", "Qwen2MLP", "Qwen2Attention"} <= set(own) and len(own) == 1 + 2 * 4
    (micro,) = microbatches(gradients.batch(), torch.arange(gradients.EPISODES)[:, None], 1000, world)
    results = []
    for policy in (plain, patched):
        logprobs = policy(micro)
        logprobs.square().sum().backward()
        results.append([logprobs, *(p.grad for p in policy.parameters())])
    for want, got in zip(*results, strict=True):
        assert float((got - want).norm() / want.norm()) < 1e-4


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="Liger is not installed")
def test_with_the_stream_in_fp32_bf16_is_nearer_to_the_exact_model(tmp_path: Path, world: World) -> None:
    """Log-probabilities and gradients against the same weights in fp32; checkpointing changes no bit."""
    save_qwen(tmp_path, 12, torch.bfloat16)
    (micro,) = microbatches(gradients.batch(), torch.arange(gradients.EPISODES)[:, None], 1000, world)

    def results(dtype: torch.dtype, *patches: Callable[..., bool], checkpointing: bool = False) -> list[Tensor]:
        policy = models.load_policy(str(tmp_path), checkpointing, dtype).cuda().train()
        assert all(patch(policy.model) for patch in patches)
        logprobs = policy(micro)
        (logprobs * torch.linspace(-1, 1, len(logprobs), device="cuda")).sum().backward()
        return [logprobs.detach(), *(p.grad for p in policy.parameters())]

    exact = results(torch.float32)
    rounded = results(torch.bfloat16, liger.patch)
    kept = results(torch.bfloat16, liger.patch, residual.patch)
    again = results(torch.bfloat16, liger.patch, residual.patch, checkpointing=True)
    assert torch.equal(kept[0], again[0])
    errors = [
        [float((got.float() - want).norm() / want.norm()) for got, want in zip(found, exact, strict=True)]
        for found in (rounded, kept, again)
    ]
    assert errors[1][0] < errors[0][0] and sum(errors[1]) < 0.9 * sum(errors[0])
    assert max(errors[1]) < 0.06 and max(errors[2]) < 0.06


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_offload_frees_the_gpu_and_gives_the_same_bits_back(qwen: str, world: World, stage: int) -> None:
    """Twelve bytes a parameter leave for pinned memory, cycle after cycle, and training goes on."""
    trainer = offloading.trainer(qwen, stage, "bfloat16", world)
    engines = list(trainer.engines.values())
    parameters = sum(getattr(p, "ds_numel", p.numel()) for engine in engines for p in engine.module.parameters())
    levels = []
    for seed in range(4):
        metrics = offloading.update(trainer, seed)
        assert metrics["policy/grad_norm"] > 0 and metrics["value/grad_norm"] > 0
        before, held = offloading.everything(trainer), torch.cuda.memory_allocated()
        freed = trainer.offload()
        assert freed >= 12 * parameters
        assert held - torch.cuda.memory_allocated() == pytest.approx(freed, rel=0.05)
        assert all(chunk.is_pinned() for states in trainer._states for host in states._hosts for chunk in host)
        levels.append(torch.cuda.memory_allocated() - sum(tensor.nbytes for tensor in before))
        trainer.reload()
        assert offloading.same(before, offloading.everything(trainer))
        del before
    assert max(levels[1:]) <= 1.01 * min(levels[1:]) + 2**20


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_every_parameter_moves(qwen: str, world: World, stage: int) -> None:
    """In bf16, with Liger and the attention kernel: none is frozen by a wrapper, biases and norms included."""
    trainer = offloading.trainer(qwen, stage, "bfloat16", world)
    if importlib.util.find_spec("liger_kernel") is not None:
        for engine in trainer.engines.values():
            assert "forward" in vars(engine.module.model.base_model.layers[0]), "the residual stream is in fp32"
    before = {n: t.clone() for n, t in weights.full_weights(trainer.policy)}
    offloading.update(trainer, 0)
    after = dict(weights.full_weights(trainer.policy)) if stage != 3 else None
    for name, tensor in after.items() if after else weights.full_weights(trainer.policy):
        assert not torch.equal(before[name], tensor), name


def test_no_wider_copy_of_the_weights_on_the_way_in(qwen: str, world: World) -> None:
    """ZeRO-2 in bf16 holds six bytes a parameter once built, and never an fp32 model beside its master weights."""
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    trainer = offloading.trainer(qwen, 2, "bfloat16", world)
    parameters = sum(p.numel() for engine in trainer.engines.values() for p in engine.module.parameters())
    held, peak = (torch.cuda.memory_allocated() - start), (torch.cuda.max_memory_allocated() - start)
    assert held == pytest.approx(6 * parameters, rel=0.1)
    assert peak <= 9 * parameters


UNEVEN = """
import random, torch
from engine.memory.meter import use_growing_segments
use_growing_segments()
rng = random.Random(0)
for _ in range(8):
    rows, kept = rng.randrange(15_800, 16_384), []
    for _ in range(60):
        temporary = torch.empty(rows, 3000, dtype=torch.bfloat16, device="cuda")
        kept.append(torch.empty(rows, 2240, dtype=torch.bfloat16, device="cuda"))
        del temporary
    while kept:
        temporary = torch.empty(rows, 3000, dtype=torch.bfloat16, device="cuda")
        kept.pop()
print(torch.cuda.max_memory_reserved() / torch.cuda.max_memory_allocated())
"""


def test_uneven_microbatches_hold_what_they_need() -> None:
    """In a process of its own: the allocator's settings stay. Blocks of fixed sizes pile up over the microbatches."""
    free = {name: value for name, value in os.environ.items() if not name.startswith("PYTORCH_")}
    command = [sys.executable, "-c", UNEVEN]
    done = subprocess.run(command, cwd=ROOT, env=free, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.1
