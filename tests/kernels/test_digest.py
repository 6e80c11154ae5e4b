"""The digest of a tensor on a GPU is the one that a CPU takes of the same bits."""

import pytest
import torch

from engine.models import digest as plain
from kernels.triton import digest

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton is interpreted


@pytest.mark.parametrize("count", [0, 1, digest.BLOCK - 1, digest.BLOCK, 2 * digest.BLOCK + 77])
@pytest.mark.parametrize("bits", [torch.uint8, torch.int16, torch.int32])
def test_digests_agree(bits: torch.dtype, count: int) -> None:
    found = torch.iinfo(bits)
    drawn = torch.randint(found.min, found.max + 1, (count,), dtype=torch.int64).to(bits)
    assert int(digest.digest(drawn.to(DEVICE), plain.MULTIPLIER)) == int(plain.digest(drawn))


@pytest.mark.gpu
def test_a_tensor_of_more_than_two_to_the_31_bytes_and_odd_layouts() -> None:
    torch.manual_seed(0)
    large = torch.randn(2**30 + 5, device="cuda", dtype=torch.bfloat16)
    assert int(plain.digest(large)) == int(plain.digest(large.cpu()))
    odd = large[1 : 1 + 300 * 700].view(300, 700)
    for one in (odd, odd.T, odd[3:, 5:]):
        assert int(plain.digest(one)) == int(plain.digest(one.cpu()))
