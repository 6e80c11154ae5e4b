"""What is particular to the compiled CPU backend; the common suite runs on it too."""

import os
import subprocess
import sys

import pytest
import torch

import kernels
from kernels import chunked
from kernels.dispatch import is_built
from kernels.head import Head, Problem, RowGradients
from tests.system.helpers import ROOT, importing

pytestmark = pytest.mark.skipif(not is_built("cpu"), reason="kernels._cpu not built")
ALL = (True, True, False)


def scanner_for(problem, workspace=1e9, **guesses):
    from kernels.cpu import make_scanner

    head = Head(problem.weight, problem.bias, torch.ones(len(problem.hidden)), None)
    valid = problem.targets >= 0
    return make_scanner(
        Problem(problem.hidden, head, problem.targets.clamp(min=0), valid, **guesses), float(workspace), ALL
    )


def gradients(scanner, rows, grads):
    found = scanner.scan(slice(0, rows))
    scanner.begin(1)
    scanner.backward(slice(0, rows), grads)
    return [*found, *scanner.finish()[:2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("off", [0, 30, -30, 60, -60, 85, -85, 120, -120, "mixed", float("nan")])
def test_a_wrong_anchor_costs_time_alone(tools, dtype, off):
    rows = 39
    problem = tools.make_problem(rows, 1003, dtype=dtype)
    logits = problem.hidden.double() @ problem.weight.double().t()
    offsets = torch.linspace(-120, 120, rows) if off == "mixed" else torch.full((rows,), float(off))
    valid = problem.targets >= 0
    random = torch.Generator().manual_seed(1)
    grads = RowGradients(*(torch.where(valid, torch.randn(rows, generator=random), 0.0) for _ in range(2)))
    anchored = gradients(scanner_for(problem, anchor=logits.logsumexp(1).float() + offsets), rows, grads)
    plain = gradients(scanner_for(problem), rows, grads)
    for value, expected in zip(anchored, plain, strict=True):
        assert tools.relative_error(value, expected) < {4: 5e-6, 2: 4e-3}[dtype.itemsize]
    exact = logits.log_softmax(1).gather(1, problem.targets.clamp(min=0)[:, None]).squeeze(1)
    torch.testing.assert_close(anchored[0].double()[valid], exact[valid], rtol=0, atol=1e-4)


@pytest.mark.parametrize("width", [48, 33])
def test_without_the_bf16_kernels_of_the_cpu(tools, width):
    problem = tools.make_problem(50, 257, width=width, dtype=torch.bfloat16)
    grads = RowGradients(torch.where(problem.targets >= 0, torch.linspace(-1, 1, 50), 0.0), None)
    fast = gradients(scanner_for(problem), 50, grads)
    with torch.backends.mkldnn.flags(enabled=False):
        slow = gradients(scanner_for(problem), 50, grads)
    for value, expected in zip(slow, fast, strict=True):
        assert tools.relative_error(value, expected) < 4e-3


LATER = [pytest.param(one, marks=pytest.mark.slow) for one in ("AVX512_CORE_VNNI", "AVX512_CORE_BF16")]


@pytest.mark.parametrize("instructions", ["AVX2", "AVX512_CORE", *LATER])
def test_bf16_on_older_processors(instructions):
    """oneDNN has no bf16 kernels for some of them and says so in an exception of its own."""
    script = (
        "import torch, kernels\n"
        "x, w, y = torch.randn(4, 8).bfloat16(), torch.randn(11, 8).bfloat16(), torch.tensor([1, 2, 3, 4])\n"
        "fast, plain = (kernels.linear_logprob(x, w, y, backend=name) for name in ('cpu', 'reference'))\n"
        "torch.testing.assert_close(fast, plain, rtol=0, atol=1e-3)\n"
    )
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": instructions, "PYTHONPATH": importing(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_only_live_rows_are_multiplied(tools, monkeypatch):
    from kernels import _cpu

    problem = tools.make_problem(64, 127).leaves()
    advantages = (torch.arange(64) % 4 == 0).float()
    multiplied = []

    def spy(name):
        function = getattr(_cpu, name)
        monkeypatch.setattr(_cpu, name, lambda e, *rest: multiplied.append(e.shape[1]) or function(e, *rest))

    spy("add_product")
    spy("transposed_product")
    for live, values in ((int(((advantages != 0) & (problem.targets >= 0)).sum()), advantages), (0, advantages * 0)):
        multiplied.clear()
        kernels.linear_policy_loss(
            problem.hidden, problem.weight, problem.targets, advantages=values, token_weights=torch.ones(64),
            loss="reinforce", backend="cpu",
        )  # fmt: skip
        assert multiplied == [live, live] * (live > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_chunks_take_an_eighth_of_eager(tools, dtype):
    problem = tools.make_problem(512, 257, dtype=dtype)
    scanner = scanner_for(problem)
    spans = chunked.scanner_spans(scanner, 512)
    assert scanner.chunk_rows >= 512, "sequences and pairs may use all of the workspace"
    assert max(span.rows.stop - span.rows.start for span in spans) * dtype.itemsize <= 0.75 * 512
    assert sum(span.rows.stop - span.rows.start for span in spans) == 512
    assert all((span.rows.stop - span.rows.start) % 16 == 0 for span in spans)


@pytest.mark.parametrize("every", [1, 7, 67])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_live_rows_of_several_chunks_are_multiplied_together(tools, dtype, every):
    """Odd numbers of them, between rows that hold NaN."""
    rows = 203
    problem = tools.make_problem(rows, 257, dtype=dtype)
    alive = (torch.arange(rows) % every == 0) & (problem.targets >= 0)
    problem.targets[~alive] = -100
    problem.hidden[~alive] = torch.nan
    grads = RowGradients(torch.where(alive, torch.linspace(-1, 1, rows), 0.0), None)
    scanner = scanner_for(problem)
    assert scanner.preferred_rows < rows / 2
    found = chunked.backward_all(scanner, rows, grads)
    problem.hidden[~alive] = 0
    expected = gradients(scanner_for(problem), rows, grads)[2:]
    for value, truth in zip(found[:2], expected, strict=True):
        assert tools.relative_error(value, truth) < {4: 1e-6, 2: 4e-3}[dtype.itemsize]
    assert (found[0][~alive] == 0).all()
