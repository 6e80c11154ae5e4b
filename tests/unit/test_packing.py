"""Microbatches: nothing lost, nothing over budget, rows and targets from lengths alone."""

import random

import pytest
import torch

from engine.machine.world import World
from engine.sample import Sample
from engine.training import attention, packing
from engine.training.token_store import TokenStore


class Alone(World):
    """One rank without a process group; ``others`` is what another rank would answer."""

    others = 0.0

    def max(self, value: float) -> float:
        return max(value, self.others)


def world(others: float = 0.0) -> World:
    alone = type("Alone", (Alone,), {"others": others})
    return alone(0, 1, torch.device("cpu"))


def samples(seed: int, count: int = 20) -> list[Sample]:
    """Random lengths and tokens; token 0 is everywhere, so a mask from its value would show."""
    rng = random.Random(seed)
    return [
        Sample(
            index=i,
            group_id=i,
            prompt_ids=[rng.choice([0, 1, 2]) for _ in range(rng.randint(1, 9))],
            response_ids=[rng.choice([0, 1, 2]) for _ in range(rng.randint(1, 9))],
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_fill_keeps_the_budget_and_every_sequence(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 50) for _ in range(100)]
    groups = packing.fill(lengths, 64)
    assert sorted(i for group in groups for i in group) == list(range(100))
    assert all(sum(lengths[i] for i in group) <= 64 for group in groups)
    assert len(groups) <= 2 * sum(lengths) / 64 + 1


def test_fill_refuses_what_cannot_fit() -> None:
    with pytest.raises(ValueError, match="65 tokens"):
        packing.fill([3, 65], 64)


@pytest.mark.parametrize("seed", range(3))
def test_rows_predict_exactly_the_response_tokens(seed: int) -> None:
    batch = samples(seed)
    for micro in packing.microbatches(batch, torch.arange(len(batch))[:, None], 40, world()):
        expected_rows, expected_targets, start = [], [], 0
        for i in micro.indices:
            prompt, response = batch[i].prompt_ids, batch[i].response_ids
            expected_rows += [start + len(prompt) - 1 + k for k in range(len(response))]
            expected_targets += response
            ids = micro.input_ids[0, start : start + batch[i].length].tolist()
            assert ids == prompt + response
            assert micro.position_ids[0, start : start + batch[i].length].tolist() == list(range(batch[i].length))
            start += batch[i].length
        assert micro.rows.tolist() == expected_rows and micro.targets.tolist() == expected_targets
        assert micro.last.tolist() == (micro.layout.cu_seqlens[1:] - 1).tolist()
        assert micro.cu_seqlens.diff().tolist() == [len(batch[i].response_ids) for i in micro.indices]


def test_ranks_make_equally_many_passes() -> None:
    batch = samples(0)
    own = packing.microbatches(batch, torch.arange(20)[:, None], 60, world())
    padded = packing.microbatches(batch, torch.arange(20)[:, None], 60, world(others=len(own) + 2))
    assert [m.counts for m in padded] == [True] * len(own) + [False] * 2


@pytest.mark.parametrize("window", [None, 16])
def test_variable_length_kernel_is_asked_for_what_the_model_wants(window: int | None) -> None:
    """The arguments as PyTorch's autograd keeps them; tests/gpu compares the numbers."""
    packed = packing.Layout(torch.tensor([0, 12, 20], dtype=torch.int32, device="meta"), 12, torch.arange(20))
    q, k, v = (torch.empty(20, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 2, 2))
    out = attention._varlen(q.requires_grad_(), k.requires_grad_(), v, packed, 0.3, window)
    saved = out.grad_fn
    assert out.shape == (20, 4, 64)
    assert (saved._saved_scale, saved._saved_dropout_p, saved._saved_max_q) == (0.3, 0.0, 12)
    left = -1 if window is None else 15  # a window counts the token itself
    assert (saved._saved_window_size_left % 2**64, saved._saved_window_size_right) == (left % 2**64, 0)
    assert saved._saved_is_causal == (window is None)
    out.sum().backward()
    assert k.grad.shape == k.shape, "grouped heads are not spread out"


def test_token_store_puts_rows_back() -> None:
    batch = samples(1)
    store = TokenStore(batch)
    vector = torch.arange(float(store.cu_seqlens[-1]))
    out = store.empty()
    for micro in packing.microbatches(batch, torch.arange(len(batch))[:, None], 40, world()):
        store.put(out, micro, store.take(vector, micro))
    assert torch.equal(out, vector)
