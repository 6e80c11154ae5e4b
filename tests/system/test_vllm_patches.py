"""vLLM without each of Tandem's patches still does what the patch is for. Where it no longer does, the patch goes.

What only a GPU shows is in tests/gpu/test_vllm_patches.py.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

from engine.generation.vllm_compat import CPU_BUILD, PATCHES
from engine.generation.vllm_process import HARMLESS
from tests.system import plain_vllm
from tests.system.helpers import ROOT, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SHAPE = {
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=1, tie_word_embeddings=True)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE)),  # which vLLM runs by transformers
}
NEEDS_MORE = ("is already registered", "Triton kernel JIT compilation during inference")
"""Warnings that need an earlier engine of the process, and a GPU."""


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What plain_vllm saw of each model, and under ``output`` all that it wrote."""
    seen: dict[str, Any] = {}
    for name, model in MODELS.items():
        folder = tmp_path_factory.mktemp(name)
        model().save_pretrained(folder)
        output = run_ranks(1, plain_vllm.__file__, str(folder))
        (line,) = re.findall(r"^\{.*\}$", output, re.MULTILINE)
        seen[name] = json.loads(line) | {"output": output}
    return seen


@pytest.fixture(scope="module")
def host() -> dict[str, float]:
    """Milliseconds of the host for one token of every response, without and with the patches for speed."""
    output = run_ranks(1, "-m", "benchmarks.vllm_host", "--json", timeout=500)
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    return found


def test_every_patch_has_a_test_of_its_name() -> None:
    for module in ("vllm", "vllm_process", "vllm_patches", "shared_weights"):
        importlib.import_module(f"engine.generation.{module}")
    gpu = (ROOT / "tests" / "gpu" / "test_vllm_patches.py").read_text()
    for name, patch in PATCHES.items():
        source = Path(__file__).read_text() if CPU_BUILD in patch.builds else gpu
        assert f"\ndef test_{name}(" in source, name


def test_mute_harmless_warnings(without: dict[str, Any]) -> None:
    for logger, part in HARMLESS:
        if part not in NEEDS_MORE:
            assert part in without["llama"]["output"], logger


def test_random_state_kept(without: dict[str, Any]) -> None:
    assert not without["llama"]["random states at start"] and not without["llama"]["random states in a call"]


def test_process_kept(without: dict[str, Any]) -> None:
    seen = without["llama"]
    assert "LD_PRELOAD" in seen["variables"] and not seen["set_num_threads"] and seen["frozen"]
    assert seen["matmul precision"] != "high", "it was before"


def test_leave_memory_unbound(without: dict[str, Any]) -> None:
    assert without["llama"]["bound"]


def test_name_shared_memory(without: dict[str, Any]) -> None:
    """Two processes of different models have the same name for it."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    assert without["llama"]["shared memory"] == without["gpt_neox"]["shared memory"]
    group = SimpleNamespace(unique_name="tp:0", ranks=[0, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_DIST_IDENT", without["llama"]["shared memory"])
        assert _CPUSHMDistributed.make_group_name(group) == _CPUSHMDistributed.make_group_name(group)


def test_model_classes_kept(without: dict[str, Any]) -> None:
    """transformers' model cannot be built any more."""
    assert "vLLM config is not set" in without["gpt_neox"]["error"]


def test_keep_process_group(without: dict[str, Any]) -> None:
    assert not without["llama"]["process group"]


def test_copied(without: dict[str, Any]) -> None:
    """Besides the tied head's, which are lost anyway."""
    lost = without["llama"]["lost"]
    assert set(lost["spoilt"]) > set(lost["kept"])


def test_repack_tied_head(without: dict[str, Any]) -> None:
    assert without["llama"]["lost"]["kept"] == ["model.embed_tokens.weight"]


def test_requests_forgotten(without: dict[str, Any]) -> None:
    assert without["llama"]["requests stay"]


def test_count_ranks_uncompiled(without: dict[str, Any]) -> None:
    first, second = without["llama"]["seconds"]
    assert first > second + 1


@pytest.mark.alone
def test_responses(host: dict[str, float]) -> None:
    assert host["responses"] < 0.95 * host["vllm"] and host["both"] < 0.9 * host["look_up_blocks_once"]


@pytest.mark.alone
def test_look_up_blocks_once(host: dict[str, float]) -> None:
    assert host["look_up_blocks_once"] < 0.95 * host["vllm"] and host["both"] < 0.9 * host["responses"]
