"""The digest by which sampler and trainer compare their weights: what it must see, and what it must not."""

import pytest
import torch
from torch import nn

from engine.models import digest

ONE_BF16_STEP = 1  # of the bit pattern, which is one unit in the last place


def value(tensor: torch.Tensor) -> int:
    return digest.read([digest.digest(tensor)])[0]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def weights(request: pytest.FixtureRequest) -> torch.Tensor:
    return (torch.randn(300, 700, generator=torch.Generator().manual_seed(1)) * 0.02).to(request.param)


def test_any_one_changed_bit_is_seen(weights: torch.Tensor) -> None:
    before = value(weights)
    for bit in range(8 * weights.element_size()):
        changed = weights.clone()
        bits(changed)[123, 456] ^= -(2**bit) if bit == 8 * weights.element_size() - 1 else 2**bit
        assert value(changed) != before, bit


def test_no_two_16_bit_elements_have_one_digest_and_hardly_two_steps_the_same_difference() -> None:
    every = torch.arange(14_000, 18_000).to(torch.int16).view(torch.bfloat16)  # 5e-6 to 1e4
    found = torch.tensor(digest.read([digest.digest(one) for one in every.split(1)]))
    assert len(found.unique()) == 4000
    assert len(found.diff().unique()) > 3990


def test_changes_that_cancel_in_a_sum_are_seen(weights: torch.Tensor) -> None:
    """As an update in bf16 at a small learning rate is: few elements, each up or down by one in the last place."""
    before, draw = value(weights), torch.Generator().manual_seed(2)
    for trial in range(100):
        changed = weights.clone()
        places = torch.randperm(changed.numel(), generator=draw)[: 2 * (1 + trial % 50)]
        bits(changed).view(-1)[places[::2]] += ONE_BF16_STEP
        bits(changed).view(-1)[places[1::2]] -= ONE_BF16_STEP
        assert value(changed) != before


def test_order_layout_and_zero_padding_do_not_count(weights: torch.Tensor) -> None:
    expected = value(weights)
    shuffled = weights.reshape(-1)[torch.randperm(weights.numel(), generator=torch.Generator().manual_seed(3))]
    padded = torch.zeros(310, 704, dtype=weights.dtype)
    padded[:300, :700] = weights
    for other in (weights.T, shuffled, padded, weights.reshape(30, 70, 10, 10).permute(2, 0, 3, 1)):
        assert value(other) == expected


def test_a_fused_matrix_has_the_sum_of_its_parts(weights: torch.Tensor) -> None:
    assert value(weights) == sum(value(part) for part in weights.split([100, 50, 150]))


def test_the_sign_of_zero_and_numbers_that_are_none_count() -> None:
    assert value(torch.zeros(5)) == value(torch.zeros(0)) == 0
    assert value(torch.tensor([-0.0])) != 0
    assert value(torch.tensor([float("nan")])) == value(torch.tensor([float("nan")]))


def test_a_part_of_a_tensor_is_read_as_it_lies_in_memory_and_none_changes(weights: torch.Tensor) -> None:
    kept = weights.clone()
    assert value(weights[10:20, 3:9]) == value(weights[10:20, 3:9].clone())
    assert torch.equal(weights, kept)


def test_a_models_digest_sees_values_names_shapes_and_dtypes() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6))

    expected = digest.of_model(model())
    assert len(expected) == 64 and expected == digest.of_model(model())
    changed = model()
    with torch.no_grad():
        changed[1].weight[2] += 1e-7
    reshaped, cast = model(), model().double()
    renamed = nn.Sequential(nn.Identity(), *model())
    reshaped[0].weight = nn.Parameter(reshaped[0].weight.detach().view(4, 6))
    assert len({expected, *map(digest.of_model, (changed, renamed, reshaped, cast))}) == 5
