"""What the Triton backend decides on the host, and what it makes of input that only a direct call can give it."""

import math
import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from kernels.head import Head, Problem

pytest.importorskip("triton")

from kernels.triton.hopper import products as hopper
from kernels.triton.scanner import AnchoredScanner

ALL, NONE = (True, True, False), (False, False, False)
interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles here")


def problem(hidden, weight, targets=None, bias=None):
    rows = len(hidden)
    targets = torch.zeros(rows, dtype=torch.int64) if targets is None else targets
    head = Head(weight, bias, torch.ones(rows), None)
    return Problem(hidden, head, targets, torch.ones(rows, dtype=torch.bool), entropy_gradient=False)


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


@interpreted
@pytest.mark.parametrize("wrong", [-1, 40, 10**6, 2**33])
def test_a_target_that_is_no_column_spoils_its_own_row_alone(wrong):
    """A GPU's targets are not looked at: the row is NaN, and no address is made of it."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(5, 16, generator=generator), torch.randn(40, 16, generator=generator)
    targets = torch.tensor([3, wrong, 39, 0, 7])
    scanner = AnchoredScanner(problem(hidden, weight, targets), 2.0**24, NONE)
    logprobs, entropy = scanner.scan(slice(0, 5))
    rest = [0, 2, 3, 4]
    exact = (hidden @ weight.t()).log_softmax(1)[rest, targets[rest]]
    assert math.isnan(logprobs[1]) and math.isnan(entropy[1])
    torch.testing.assert_close(logprobs[rest], exact, rtol=0, atol=1e-5)


@interpreted
def test_a_bias_of_any_stride():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(5, 16, generator=generator), torch.randn(40, 16, generator=generator)
    bias = torch.randn(40, 2, generator=generator)[:, 1]
    logprobs, _ = AnchoredScanner(problem(hidden, weight, bias=bias), 2.0**24, NONE).scan(slice(0, 5))
    exact = (hidden @ weight.t() + bias).log_softmax(1)[:, 0]
    torch.testing.assert_close(logprobs, exact, rtol=0, atol=1e-5)
