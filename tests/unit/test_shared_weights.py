"""Fused matrices as views of their parts: names, neighbourhood in memory, and a loader that may change nothing."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from engine.generation.shared_weights import SharedWeights, _OntoThemselves, apart, end_to_end, fused, lay_end_to_end

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def flat(*shapes: tuple[int, ...], start: int = 0) -> list[nn.Parameter]:
    """Parameters end to end in one buffer, numbered through."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    buffer = torch.arange(start + sum(sizes), dtype=torch.float32)[start:]
    return [nn.Parameter(part.view(shape)) for part, shape in zip(buffer.split(sizes), shapes, strict=True)]


def test_names_are_those_of_vllm_and_parts_in_its_order() -> None:
    names = [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.v_proj.weight",  # the model's order is not vLLM's
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "lm_head.weight",
    ]
    parameters = {name: nn.Parameter(torch.zeros(8, 4)) for name in names}
    vectors = {"model.layers.0.self_attn.q_proj.bias": nn.Parameter(torch.zeros(8))}
    found = fused(parameters | vectors, PACKED)
    by_address = {id(parameter): name.split(".")[-2] for name, parameter in parameters.items()}
    assert {name: [by_address[id(part)] for part in parts] for name, parts in found.items()} == {
        "model.embed_tokens.weight": ["embed_tokens"],
        "model.layers.0.self_attn.qkv_proj.weight": ["q_proj", "k_proj", "v_proj"],
        "model.layers.0.self_attn.o_proj.weight": ["o_proj"],
        "model.layers.0.mlp.gate_up_proj.weight": ["gate_proj", "up_proj"],
        "lm_head.weight": ["lm_head"],
    }


def test_the_view_is_the_parts_and_follows_them() -> None:
    parts = flat((8, 4), (2, 4), (2, 4))
    assert apart("qkv", parts) is None
    whole = end_to_end(parts)
    assert torch.equal(whole, torch.cat(parts)) and not whole.requires_grad
    parts[1].data.fill_(-1)
    assert (whole[8:10] == -1).all() and (whole != -1).sum() == 40


def test_what_does_not_lie_end_to_end_is_seen() -> None:
    first, second, third = flat((8, 4), (8, 4), (8, 4))
    assert "the parts of qkv do not lie end to end" in str(apart("qkv", [first, third]))
    assert "do not lie" in str(apart("qkv", [second, first]))
    assert "do not lie" in str(apart("qkv", [first, nn.Parameter(torch.zeros(8, 4))]))
    assert "do not lie" in str(apart("o", [nn.Parameter(torch.zeros(4, 8).T)]))
    assert "no multiple of 16 bytes" in str(apart("o", flat((8, 4), start=2)))


def test_parts_that_are_moved_together_keep_their_values() -> None:
    parts = [nn.Parameter(torch.randn(rows, 4)) for rows in (8, 2, 2)]
    before = torch.cat(parts).detach()
    lay_end_to_end(parts)
    assert apart("qkv", parts) is None and torch.equal(end_to_end(parts), before)


def test_a_loader_may_copy_a_weight_onto_itself_only() -> None:
    one, other = flat((8, 4), (8, 4))
    vector = torch.zeros(4)
    kept = torch.cat([one, other]).detach()
    mode = _OntoThemselves([one, other])
    with mode:
        one.data.narrow(0, 2, 3).copy_(one.detach()[2:5])
        one[8:].data.fill_(0)  # vLLM clears the padding of a vocabulary, of which there is none
        vector.copy_(one.detach()[1])
    assert torch.equal(vector, kept[1])
    for write in (
        lambda: one.data.copy_(other.detach()),
        lambda: one.data.narrow(0, 2, 3).copy_(one.detach()[1:4]),
        lambda: one.data.copy_(one.detach() + 1),
        lambda: one.data.fill_(0),
    ):
        with mode, pytest.raises(RuntimeError, match=r"take a weight of shape \[.*\] as the trainer has it"):
            write()
    assert torch.equal(torch.cat([one, other]), kept)


@pytest.mark.parametrize(
    "stage, dtypes, reason",
    [(3, ["float32"] * 2, "ZeRO-3"), (2, ["float32", "bfloat16"], "several dtypes: .*bfloat16")],
)
def test_reasons_that_need_no_vllm(stage: int, dtypes: list[str], reason: str) -> None:
    model = nn.ModuleList(nn.Embedding(64, 8, dtype=getattr(torch, dtype)) for dtype in dtypes)
    model.get_input_embeddings, model.get_output_embeddings = lambda: model[0], lambda: model[1]
    engine = SimpleNamespace(module=SimpleNamespace(model=model), zero_optimization_stage=lambda: stage)
    shared = SharedWeights(engine)  # type: ignore[arg-type]
    assert re.search(reason, str(shared.fits()))
    with pytest.raises(ValueError, match=f"cannot be shared with the sampler: .*{reason}"):
        shared.register()
    with pytest.raises(RuntimeError, match="no vLLM engine uses these weights"):
        shared.refresh()
