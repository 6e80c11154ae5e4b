"""Predicted memory against what DeepSpeed and autograd really allocate, on the CPU."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.config import Config
from engine.machine.world import World, joined
from engine.memory import model_shape, training_bytes
from engine.memory.training_bytes import Engine
from engine.sample import Sample
from engine.training import models
from engine.training.packing import microbatches
from tests.system.helpers import run_ranks

WIDTH, LAYERS = 384, 12


class Allocated(TorchDispatchMode):
    """Counts bytes of new tensors: how many there are, and the most there ever were. Some may be known from before."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note((args, kwargs), new=False)
        out = function(*args, **(kwargs or {}))
        self._note(out, new=True)
        return out

    def _note(self, tree: Any, new: bool) -> None:
        for tensor in tree_leaves(tree):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                if storage._cdata not in self.sizes:
                    self.sizes[storage._cdata] = storage.nbytes() * new
                    self.now += storage.nbytes() * new
                    weakref.finalize(storage, self._drop, storage._cdata)
        self.peak = max(self.peak, self.now)

    def _drop(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().pow(2).mean()


def measured_and_predicted(stage: int, dtype: str, ranks: int) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes at four moments of training with a bucket of two layers. AdamW makes its moments in the first step.

    ZeRO-3 keeps half of the layers gathered and fetches one ahead.
    """
    from engine.training import zero

    layer = WIDTH * WIDTH
    zero.REDUCE_BUCKET = training_bytes.REDUCE_BUCKET = 2 * layer
    training_bytes.GATHERED_ELEMENTS, training_bytes.FETCHED_ELEMENTS = LAYERS // 2 * layer, layer
    plain = zero._settings

    def settings(config: Config, stage: int) -> dict[str, Any]:
        found = plain(config, stage)
        found["zero_optimization"] |= {
            "stage3_max_reuse_distance": training_bytes.GATHERED_ELEMENTS,
            "stage3_max_live_parameters": training_bytes.GATHERED_ELEMENTS,
            "stage3_prefetch_bucket_size": training_bytes.FETCHED_ELEMENTS,
        }
        return found

    zero._settings = settings
    config = Config.model_validate(
        {"data": {"task": "addition"}, "model": {"dtype": dtype}, "train": {"zero_stage": stage}}
    )
    item = training_bytes.item_bytes(config)
    expected = Engine(parameters=LAYERS * layer, largest=layer, item=item, stage=stage, ranks=ranks)
    peaks = {}
    with Allocated() as memory:
        engine = zero.build(Stack(), config, learning_rate=1e-3, total_steps=9)
        for _ in range(2):
            for microbatch in range(3):
                memory.peak = peaks["accumulated" if microbatch else "rest"] = memory.now
                engine.backward(engine(torch.ones(1, WIDTH, dtype=getattr(torch, dtype))), scale_wrt_gas=False)
                peaks["backward"] = memory.peak
            memory.peak = memory.now
            engine.step()
            peaks["step"] = memory.peak
    rest = expected.weights + expected.states + expected.buffers
    accumulated = rest + expected.accumulated
    backward = accumulated + expected.gathered + expected.in_flight
    step = rest + expected.step
    return peaks, {"rest": rest, "accumulated": accumulated, "backward": backward, "step": step}


def test_settings_known_without_torch_are_those_of_the_trainer() -> None:
    from engine.training import liger, zero

    assert training_bytes.REDUCE_BUCKET == zero.REDUCE_BUCKET
    assert training_bytes.LLAMA_LIKE == liger.LLAMA_LIKE


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    from engine.training import zero

    with pytest.MonkeyPatch.context() as patch, joined("cpu", 1):
        for module in (zero, training_bytes):  # what the measurement sets does not outlast it
            patch.setattr(module, "REDUCE_BUCKET", module.REDUCE_BUCKET)
        patch.setattr(zero, "_settings", zero._settings)
        for name in ("GATHERED_ELEMENTS", "FETCHED_ELEMENTS"):
            patch.setattr(training_bytes, name, getattr(training_bytes, name))
        yield


@pytest.mark.parametrize(
    "stage,dtype", [(0, "bfloat16"), (1, "bfloat16"), (2, "bfloat16"), (3, "bfloat16"), (2, "float32")]
)
def test_an_engine_allocates_what_is_predicted(one_rank: None, stage: int, dtype: str) -> None:
    peaks, predicted = measured_and_predicted(stage, dtype, 1)
    assert peaks == pytest.approx(predicted, rel=0.03)


@pytest.mark.slow
def test_two_ranks_allocate_what_is_predicted() -> None:
    for stage, (peaks, predicted) in json.loads(run_ranks(2, __file__).splitlines()[-1]).items():
        assert peaks == pytest.approx(predicted, rel=0.02), f"ZeRO-{stage}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_a_forward_pass_saves_what_is_predicted(family: str, checkpointing: bool, dtype, tmp_path: Path) -> None:
    """Without Liger, and less the copies that attention on a CPU makes to see one sequence a batch row."""
    config = getattr(transformers, f"{family}Config")(
        hidden_size=128, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=320, vocab_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(tmp_path)
    shape = model_shape.read("model.path", str(tmp_path))
    policy = models.load_policy(str(tmp_path), checkpointing).to(dtype).train()
    assert shape.policy == sum(parameter.numel() for parameter in policy.parameters())
    samples = [Sample(index=i, group_id=i, prompt_ids=[1] * 32, response_ids=[2] * 32) for i in range(16)]
    batch = microbatches(samples, torch.arange(16)[:, None], 1024, World(0, 1, torch.device("cpu")))[0]
    with Allocated() as memory:
        hidden = policy.model.base_model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, packed=batch.layout
        )
    expected = training_bytes.Pass(shape, 1024, dtype.itemsize, checkpointing, fused=False)
    heads = shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    copies = -expected.layer if checkpointing else shape.layers * dtype.itemsize * heads
    assert memory.now == pytest.approx(expected.activations + 1024 * copies, rel=0.06), hidden


if __name__ == "__main__":
    with joined("cpu", 2) as world:
        found = {stage: measured_and_predicted(stage, "bfloat16", 2) for stage in (1, 2, 3)}
        if world.main:
            print(json.dumps(found))
