"""What the Triton backend decides on the host, and what it makes of input that only a direct call can give it."""

import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from kernels.head import Head, Problem

pytest.importorskip("triton")

from kernels.triton.hopper import products as hopper
from kernels.triton.scanner import AnchoredScanner

ALL, NONE = (True, True, False), (False, False, False)


def problem(hidden, weight, targets=None, bias=None):
    rows = len(hidden)
    targets = torch.zeros(rows, dtype=torch.int64) if targets is None else targets
    head = Head(weight, bias, hidden.new_ones(rows, dtype=torch.float32), None)
    valid = hidden.new_ones(rows, dtype=torch.bool)
    return Problem(hidden, head, targets.to(hidden.device), valid, entropy_gradient=False)


def random_head(run, dtype=torch.float32):
    if run.backend != "triton":
        pytest.skip("another backend")
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, 16, generator=generator).to(run.device, dtype) for size in (5, 40)]


@pytest.mark.parametrize("needs", [ALL, NONE], ids=["gradients", "none"])
@pytest.mark.parametrize("on_hopper", [False, True], ids=["portable", "hopper"])
def test_copies_of_hidden_count_as_workspace(monkeypatch, on_hopper, needs):
    """A chunk of hidden is made contiguous where the kernels cannot read it as it is."""
    monkeypatch.setattr(hopper, "is_hopper", lambda device: on_hopper)
    monkeypatch.setattr("kernels.triton.scanner.processors", lambda device: 4)
    weight = torch.zeros(64, 4096, dtype=torch.bfloat16)

    def row_bytes(hidden):
        return 2**24 / AnchoredScanner(problem(hidden, weight), 2.0**24, needs).chunk_rows

    plain = row_bytes(torch.zeros(8, 4096, dtype=torch.bfloat16))
    strided = row_bytes(torch.zeros(8, 8192, dtype=torch.bfloat16)[:, ::2])
    assert strided - plain > 0.9 * 2 * 4096
    unaligned = row_bytes(torch.zeros(8, 4104, dtype=torch.bfloat16)[:, 1:4097])
    assert unaligned == (strided if on_hopper else plain)


def test_one_copy_of_hidden_at_a_time(run, monkeypatch):
    hidden, weight = random_head(run)
    scanner = AnchoredScanner(problem(hidden.repeat_interleave(2, 1)[:, ::2], weight), 2.0**24, NONE)
    copies, contiguous = [], torch.Tensor.contiguous

    def copied(tensor):
        if tensor.dim() == 2:
            assert all(copy() is None for copy in copies)
        result = contiguous(tensor)
        if tensor.dim() == 2:
            copies.append(weakref.ref(result))
        return result

    monkeypatch.setattr(torch.Tensor, "contiguous", copied)
    for rows in (slice(0, 3), slice(3, 5)):
        scanner.scan(rows)
    assert len(copies) == 2


def test_the_copy_engine_takes_rows_that_do_not_overlap():
    matrix = torch.zeros(16, 64, dtype=torch.bfloat16)
    assert hopper.copies_in_bulk(matrix) and hopper.copies_in_bulk(matrix[:, :32])
    assert not hopper.copies_in_bulk(matrix[:1].expand(16, 64))
    assert not hopper.copies_in_bulk(matrix.as_strided((16, 64), (32, 1)))


def test_one_processor_makes_both_gradients():
    products = hopper.HopperProducts(problem(torch.zeros(8, 64), torch.zeros(16, 64)), 2.0**24, ALL, programs=1)
    products.begin(1)
    assert products.beside and products.dhidden_programs == products.dweight_programs == 1


def test_streams_meet_again_after_an_exception(monkeypatch):
    here, beside = (SimpleNamespace(waited=[]) for _ in range(2))
    for stream in (here, beside):
        stream.wait_stream = stream.waited.append
    monkeypatch.setattr(hopper, "second_stream", lambda device: beside)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: here)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())

    def fail(scanner, rows):
        raise torch.OutOfMemoryError

    products = hopper.HopperProducts(problem(torch.zeros(8, 64), torch.zeros(16, 64)), 2.0**24, ALL, programs=8)
    products.reserve(8)
    products.begin(1)
    monkeypatch.setattr(products, "_multiply_dhidden", lambda scanner, rows: None)
    monkeypatch.setattr(products, "_multiply_dweight", fail)
    with pytest.raises(torch.OutOfMemoryError):
        products.backward(None, slice(0, 8))
    assert beside.waited == [here] and here.waited == [beside]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("wrong", [-1, 40, 2**33])
def test_a_target_that_is_no_column_spoils_its_own_row_alone(run, wrong, dtype):
    """A GPU's targets are not looked at: the row is NaN, and no address is made of it."""
    hidden, weight = random_head(run, dtype)
    targets = torch.tensor([3, wrong, 39, 0, 7])
    logprobs, entropy = AnchoredScanner(problem(hidden, weight, targets), 2.0**24, NONE).scan(slice(0, 5))
    others = [0, 2, 3, 4]
    exact = (hidden.float() @ weight.float().t()).log_softmax(1)[others, targets[others]]
    assert logprobs[1].isnan() and entropy[1].isnan()
    torch.testing.assert_close(logprobs[others], exact, rtol=0, atol=1e-4)


def test_a_bias_of_any_stride(run):
    hidden, weight = random_head(run)
    bias = torch.linspace(-3, 3, 80, device=run.device)[::2]
    logprobs, _ = AnchoredScanner(problem(hidden, weight, bias=bias), 2.0**24, NONE).scan(slice(0, 5))
    exact = (hidden @ weight.t() + bias).log_softmax(1)[:, 0]
    torch.testing.assert_close(logprobs, exact, rtol=0, atol=1e-4)
