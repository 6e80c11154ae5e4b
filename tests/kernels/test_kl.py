import math
from dataclasses import replace

import pytest
import torch

import kernels

DIRECTIONS = ["reverse", "forward"]


@pytest.fixture(autouse=True)
def has_kl(run):
    if not run.has("linear_kl"):
        pytest.skip("leaves linear_kl to the reference")


def two_heads(tools, run, rows, vocabulary, kind="flat", dtype=torch.float32):
    """Heads of widths 48 and 24 over one vocabulary; where p is masked, q is masked in some of the same columns."""
    p = tools.make_problem(rows, vocabulary, kind=kind, dtype=dtype, device=run.device)
    q = tools.make_problem(rows, vocabulary, width=24, dtype=dtype, device=run.device, seed=1)
    if kind == "masked":
        bias = torch.randn(vocabulary, generator=torch.Generator().manual_seed(2)).to(run.device)
        bias[: vocabulary // 4] = float("-inf")
        q = replace(q, bias=bias)
    return p, q


def divergence(function, p, q, **settings):
    return function(p.hidden, p.weight, q.hidden, q.weight, bias_p=p.bias, bias_q=q.bias, **settings)


def signed(rows, device):
    return torch.randn(rows, generator=torch.Generator().manual_seed(3)).to(device)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("rows", "vocabulary", "kind"),
    [
        (7, 2, "flat"), (9, 257, "flat"), (9, 257, "negative"), (9, 257, "peaked"), (9, 257, "masked"),
        (127, 5003, "flat"), (2, 152064, "flat"),
        pytest.param(4097, 32000, "flat", marks=pytest.mark.gpu),
        pytest.param(129, 152064, "masked", marks=pytest.mark.gpu),
    ],
)  # fmt: skip
def test_matches_fp64(run, tools, direction, dtype, rows, vocabulary, kind):
    if run.interpreted and rows * vocabulary > 2500:
        pytest.skip("too large for the interpreter")
    if run.device == "cpu" and rows * vocabulary > 10**6:
        pytest.skip("too large for a CPU")
    p, q = two_heads(tools, run, rows, vocabulary, kind, dtype)
    if kind == "masked" and direction == "forward":
        p = replace(p, bias=p.bias.where(p.bias > float("-inf"), -30.0))  # q allows more than p: infinite otherwise
    own, exact, eager = p.leaves(), p.leaves(torch.float64), p.leaves()
    if eager.bias is not None:
        eager = replace(eager, bias=eager.bias.detach().to(dtype).requires_grad_())
    exact_q = replace(q, hidden=q.hidden.double(), weight=q.weight.double())
    settings = {"temperature": 0.8, "direction": direction}
    found = divergence(
        kernels.linear_kl, own, q, **settings, backend=run.backend,
        workspace_gib=2.5 * tools.workspace_for(run, p, rows // 3 + 1),
    )  # fmt: skip
    truth = divergence(kernels.reference.linear_kl, exact, exact_q, **settings)
    whole = divergence(kernels.reference.linear_kl, eager, q, **settings)
    assert found.dtype == torch.float32 and (found >= 0).all()
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-4)

    upstream = signed(rows, run.device)
    mine, exactly, eagerly = (
        torch.autograd.grad(value, problem.inputs, upstream.to(value.dtype))
        for value, problem in ((found, own), (truth, exact), (whole, eager))
    )
    rounding = {4: run.gradient_rounding, 2: 2e-3}[dtype.itemsize]
    for value, exact_value, eager_value in zip(mine, exactly, eagerly, strict=True):
        # Where p is peaked the gradient vanishes as a difference of numbers that do not.
        scale = max(exact_value.norm().item(), 1e-3 * upstream.norm().item())
        error, eager_error = ((one.double() - exact_value).norm().item() for one in (value, eager_value))
        assert error <= 2 * eager_error + rounding * scale


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_temperature_per_row_and_softcap(run, tools, direction):
    p, q = two_heads(tools, run, 9, 127)
    own, exact = p.leaves(), p.leaves(torch.float64)
    exact_q = replace(q, hidden=q.hidden.double(), weight=q.weight.double())
    temperature = torch.linspace(0.5, 1.5, 9, device=run.device)
    settings = {"softcap": 2.0, "direction": direction}
    found = divergence(kernels.linear_kl, own, q, temperature=temperature, **settings, backend=run.backend)
    truth = divergence(kernels.reference.linear_kl, exact, exact_q, temperature=temperature.double(), **settings)
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-5)
    upstream = signed(9, run.device)
    mine = torch.autograd.grad(found, own.inputs, upstream)
    for value, exact_value in zip(mine, torch.autograd.grad(truth, exact.inputs, upstream.double()), strict=True):
        assert tools.relative_error(value, exact_value) < run.gradient_rounding


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_many_tiles_strides_and_two_dtypes(run, tools, direction):
    """A vocabulary of more tiles than are combined at a time, with the mass of p and q in different ones."""
    p, q = two_heads(tools, run, 2, 5003)
    p.weight[:40] *= 3
    q.weight[4900:] *= 3
    p = replace(p, hidden=p.hidden.bfloat16(), weight=p.weight.bfloat16().t().contiguous().t())
    q = replace(q, hidden=q.hidden.repeat_interleave(2, 1)[:, ::2])
    own, exact = p.leaves(), p.leaves(torch.float64)
    exact_q = replace(q, hidden=q.hidden.double(), weight=q.weight.double())
    found = divergence(kernels.linear_kl, own, q, direction=direction, backend=run.backend)
    truth = divergence(kernels.reference.linear_kl, exact, exact_q, direction=direction)
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-5)
    mine = torch.autograd.grad(found.sum(), own.inputs)
    for value, exact_value in zip(mine, torch.autograd.grad(truth.sum(), exact.inputs), strict=True):
        assert tools.relative_error(value, exact_value) < 5e-3


def test_nearly_equal_heads_keep_their_digits(run, tools):
    """KL of 1e-5 and less, far below the rounding of a logsumexp."""
    p, _ = two_heads(tools, run, 9, 257)
    q = replace(p, hidden=p.hidden * 1.002)
    double_p, double_q = (replace(one, hidden=one.hidden.double(), weight=one.weight.double()) for one in (p, q))
    truth = divergence(kernels.reference.linear_kl, double_p, double_q)
    assert truth.max() < 1e-5
    found = divergence(kernels.linear_kl, p, q, backend=run.backend)
    torch.testing.assert_close(found.double(), truth, rtol=0.05, atol=1e-8)
    torch.testing.assert_close(
        divergence(kernels.linear_kl, p, p, backend=run.backend).cpu(), torch.zeros(9), rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("share", [1e-5, 1e-9])
def test_gradient_survives_p_and_q_near_one(run, tools, direction, share):
    """Both heads put all but about ``share`` on one token: p − q there is far below p's rounding."""
    p, q = two_heads(tools, run, 9, 127)
    bias = torch.zeros(127, device=run.device)
    bias[5] = math.log(127 / share)
    p, q = replace(p, bias=bias), replace(q, bias=bias)
    own, exact = p.leaves(), p.leaves(torch.float64)
    exact_q = replace(q, hidden=q.hidden.double(), weight=q.weight.double(), bias=bias.double())
    found = divergence(kernels.linear_kl, own, q, direction=direction, backend=run.backend)
    truth = divergence(kernels.reference.linear_kl, exact, exact_q, direction=direction)
    upstream = signed(9, run.device)
    mine = torch.autograd.grad((found * upstream).sum(), own.inputs)
    for value, exact_value in zip(mine, torch.autograd.grad((truth * upstream).sum(), exact.inputs), strict=True):
        assert tools.relative_error(value, exact_value) < 2e-4


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_smallest_temperatures_leave_numbers(run, tools, direction):
    """Powers of two, which change no digit: what a scan masks out must stay finite when it is scaled."""
    p, q = two_heads(tools, run, 9, 127, dtype=torch.bfloat16)
    settings = {"direction": direction, "backend": run.backend}
    plain = divergence(kernels.linear_kl, p, q, **settings)
    small_p, small_q = (replace(one, hidden=one.hidden * 2**-40) for one in (p, q))
    found = divergence(kernels.linear_kl, small_p, small_q, temperature=2**-40, **settings)
    torch.testing.assert_close(found, plain, rtol=1e-6, atol=1e-6)


def test_what_q_excludes_is_infinite(run, tools):
    p, q = two_heads(tools, run, 5, 127)
    bias = torch.zeros(127, device=run.device)
    bias[5] = float("-inf")
    found = divergence(kernels.linear_kl, p, replace(q, bias=bias), backend=run.backend)
    assert (found == float("inf")).all()
    found = divergence(kernels.linear_kl, replace(p, bias=bias), replace(q, bias=bias), backend=run.backend)
    assert found.isfinite().all()
    found = divergence(kernels.linear_kl, replace(p, bias=bias), q, backend=run.backend)
    assert found.isfinite().all()
    found = divergence(kernels.linear_kl, replace(p, bias=bias), q, backend=run.backend, direction="forward")
    assert (found == float("inf")).all()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_frozen_sides_dead_rows_and_no_rows(run, tools, direction):
    p, q = two_heads(tools, run, 9, 127)
    p = p.leaves()
    p.weight.requires_grad_(False)
    q = q.leaves()
    found = divergence(kernels.linear_kl, p, q, direction=direction, backend=run.backend)
    (found * (torch.arange(9, device=run.device) % 2)).sum().backward()
    assert p.weight.grad is None and q.hidden.grad is None and q.weight.grad is None
    assert ((p.hidden.grad != 0).any(1).cpu() == (torch.arange(9) % 2 == 1)).all()
    found = kernels.linear_kl(p.hidden[:0], p.weight, q.hidden[:0], q.weight, direction=direction, backend=run.backend)
    found.sum().backward()
    assert found.shape == (0,)


def test_repeats_are_bitwise_equal_on_poisoned_memory(run, tools, poisoned):
    torch.set_num_threads(2)
    p, q = two_heads(tools, run, 9, 127, dtype=torch.bfloat16)
    upstream = signed(9, run.device)

    def once():
        own = p.leaves()
        found = divergence(kernels.linear_kl, own, q, backend=run.backend)
        return [found, *torch.autograd.grad(found, own.inputs, upstream)]

    first = once()
    for _ in range(run.repeats // 2):
        assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_oracle_passes_gradcheck(run, tools, direction):
    if run.backend != "reference" or run.device != "cpu":
        pytest.skip("the oracle is no backend")
    p, q = two_heads(tools, run, 4, 5)
    p = p.leaves(torch.float64)

    def function(hidden, weight):
        return kernels.reference.linear_kl(hidden, weight, q.hidden, q.weight, direction=direction)

    assert torch.autograd.gradcheck(function, (p.hidden, p.weight))
