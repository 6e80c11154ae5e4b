"""A sum and its RMSNorm against fp64, whatever the shape, the branch and the gradients that come back."""

import pytest
import torch

import kernels

EPS = 1e-6
SIZES = [(1, 1), (7, 3), (129, 16), (7, 576), (1, 1536), (129, 100), (7, 2048), (3, 5000)]
UPSTREAM = ["both", "sum", "normed"]
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}


@pytest.fixture(autouse=True)
def has_it(run):
    if run.backend == "cpu":
        pytest.skip("the reference does this on CPUs")


def inputs(run, rows, width, dtype=torch.bfloat16, branch=True):
    generator = torch.Generator().manual_seed(width)
    residual, other = 3 * torch.randn(2, rows, width, generator=generator)
    weight = 1 + 0.3 * torch.randn(width, generator=generator)
    found = [residual, other.to(dtype) if branch else None, weight.to(dtype)]
    return [None if one is None else one.to(run.device).requires_grad_() for one in found]


def upstream(run, rows, width, dtype, which):
    generator = torch.Generator().manual_seed(rows)
    dsum, dnormed = torch.randn(2, rows, width, generator=generator).to(run.device)
    return [dsum if which != "normed" else None, dnormed.to(dtype) if which != "sum" else None]


def results(function, tensors, gradients, **options):
    """Outputs, then the gradients of the inputs that are there."""
    outputs = function(*tensors, EPS, **options)
    pairs = [(out, gradient.to(out)) for out, gradient in zip(outputs, gradients, strict=True) if gradient is not None]
    ends, starts = zip(*pairs, strict=True)
    there = [one for one in tensors if one is not None]
    grads = torch.autograd.grad(ends, there, starts, allow_unused=True)
    return [*(out.detach() for out in outputs), *grads]


@pytest.mark.parametrize("which", UPSTREAM)
@pytest.mark.parametrize("branch", [True, False], ids=["branch", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_equals_fp64(run, dtype, branch, which):
    for rows, width in SIZES:
        tensors, gradients = inputs(run, rows, width, dtype, branch), upstream(run, rows, width, dtype, which)
        found = results(kernels.add_rms_norm, tensors, gradients, backend=run.backend)
        double = [None if one is None else one.detach().double().requires_grad_() for one in tensors]
        exact = results(kernels.reference.add_rms_norm, double, gradients)
        types = [torch.float32, dtype, *(one.dtype for one in tensors if one is not None)]
        for place, (value, truth, kind) in enumerate(zip(found, exact, types, strict=True)):
            if truth is None:
                assert value is None and which == "sum"
                continue
            assert value.dtype == kind and value.shape == truth.shape
            error = (value.double() - truth).abs()
            # An element's own rounding, which the interpreter cuts off in bf16, and fp32's over what it is summed from.
            rounding = ROUNDING[kind] * (2 if run.interpreted and kind == torch.bfloat16 else 1)
            bound = rounding * truth.abs() + 2**-19 * truth.abs().max() + 1e-6
            assert bool((error <= bound).all()), (place, rows, width, float((error / bound).max()))


def test_the_sum_is_not_rounded_and_the_norm_once(run):
    """2^12 + 1 has no place in bf16, nor has the difference from it in the norm."""
    residual = torch.full((2, 8), 4096.0, device=run.device)
    branch = torch.ones(2, 8, dtype=torch.bfloat16, device=run.device)
    weight = torch.full((8,), 1.5, dtype=torch.bfloat16, device=run.device)
    total, normed = kernels.add_rms_norm(residual, branch, weight, EPS, backend=run.backend)
    assert torch.equal(total, torch.full_like(total, 4097.0)) and torch.equal(normed, torch.full_like(normed, 1.5))


def test_without_a_branch_nothing_is_copied(run):
    residual, _, weight = inputs(run, 5, 16, branch=False)
    total, _ = kernels.add_rms_norm(residual, None, weight, EPS, backend=run.backend)
    assert total.data_ptr() == residual.data_ptr()


def test_what_is_kept_for_the_backward_pass_is_the_sum(run):
    if run.backend != "triton":
        pytest.skip("autograd keeps what it likes")
    residual, branch, weight = inputs(run, 7, 64)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        total, _ = kernels.add_rms_norm(residual, branch, weight, EPS, backend=run.backend)
    assert {one.data_ptr() for one in kept} == {total.data_ptr(), weight.data_ptr()}


@pytest.mark.parametrize("frozen", [(0,), (0, 1), (2,)], ids=["residual", "stream", "weight"])
def test_frozen_inputs_change_no_other_gradient(run, frozen):
    tensors, gradients = inputs(run, 129, 100), upstream(run, 129, 100, torch.bfloat16, "both")
    whole = results(kernels.add_rms_norm, tensors, gradients, backend=run.backend)
    some = [one.detach().requires_grad_(place not in frozen) for place, one in enumerate(tensors)]
    outputs = kernels.add_rms_norm(*some, EPS, backend=run.backend)
    assert all(torch.equal(out, want) for out, want in zip(outputs, whole, strict=False))
    live = [(out, gradient) for out, gradient in zip(outputs, gradients, strict=True) if out.requires_grad]
    torch.autograd.backward(*zip(*live, strict=True))
    for place, one in enumerate(some):
        assert one.grad is None if place in frozen else torch.equal(one.grad, whole[2 + place])


@pytest.mark.parametrize("branch", [True, False], ids=["branch", "none"])
def test_any_strides_and_leading_dimensions(run, branch):
    tensors, gradients = inputs(run, 6, 40, branch=branch), upstream(run, 6, 40, torch.bfloat16, "both")
    want = results(kernels.add_rms_norm, tensors, gradients, backend=run.backend)

    def strided(one):
        """The same numbers, as [2, 3, 40] or as every other one of twice as many."""
        if one is None or one.dim() == 1:
            return one if one is None else one.detach().repeat_interleave(2)[::2].requires_grad_()
        return one.detach().t().contiguous().t().unflatten(0, (2, 3)).requires_grad_()

    moved = [strided(one) for one in tensors]
    assert not any(one.is_contiguous() for one in moved if one is not None)
    grads = [one.detach().t().contiguous().t().unflatten(0, (2, 3)) for one in gradients]
    got = results(kernels.add_rms_norm, moved, grads, backend=run.backend)
    for value, truth in zip(got, want, strict=True):
        torch.testing.assert_close(value.reshape(truth.shape), truth, rtol=2**-7, atol=1e-5)


def test_repeats_bit_for_bit(run):
    tensors, gradients = inputs(run, 300, 96), upstream(run, 300, 96, torch.bfloat16, "both")
    first = results(kernels.add_rms_norm, tensors, gradients, backend=run.backend)
    for _ in range(20):
        again = results(kernels.add_rms_norm, tensors, gradients, backend=run.backend)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_waits_for_nothing(run):
    if run.device != "cuda":
        pytest.skip("on a GPU only")
    tensors, gradients = inputs(run, 300, 96), upstream(run, 300, 96, torch.bfloat16, "both")
    results(kernels.add_rms_norm, tensors, gradients, backend=run.backend)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(kernels.add_rms_norm, tensors, gradients, backend=run.backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_rows(run):
    tensors, gradients = inputs(run, 0, 16), upstream(run, 0, 16, torch.bfloat16, "both")
    total, normed, dresidual, dbranch, dweight = results(
        kernels.add_rms_norm, tensors, gradients, backend=run.backend
    )  # fmt: skip
    assert total.shape == normed.shape == dresidual.shape == dbranch.shape == (0, 16)
    assert torch.equal(dweight, torch.zeros_like(dweight))


def test_large_rows_do_not_overflow(run):
    """Outliers of thousands are what residual streams really hold; in fp16 their squares would be infinite."""
    residual, branch, weight = inputs(run, 4, 64, torch.float16)
    with torch.no_grad():
        residual[:, 3] = 6e4
    _, normed = kernels.add_rms_norm(residual, branch, weight, EPS, backend=run.backend)
    _, exact = kernels.reference.add_rms_norm(residual.double(), branch.double(), weight.double(), EPS)
    torch.testing.assert_close(normed.double(), exact, rtol=2**-10, atol=1e-6)


R, B, W = torch.zeros(4, 8), torch.zeros(4, 8, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"residual": B}, ValueError, r"residual is \[4, 8\] bfloat16 .*expected \[\.\.\., 8\] float32"),
        ({"residual": R[:, :7]}, ValueError, r"residual is \[4, 7\]"),
        ({"residual": torch.zeros(())}, ValueError, r"residual is \[\]"),
        ({"residual": [1.0]}, TypeError, r"residual is a list, expected a tensor"),
        ({"branch": B[:3]}, ValueError, r"branch is \[3, 8\].*expected \[4, 8\]"),
        ({"branch": B[None]}, ValueError, r"branch is \[1, 4, 8\]"),
        ({"branch": B.long()}, ValueError, "branch is .* int64"),
        ({"weight": W[None]}, ValueError, r"weight is \[1, 8\].*expected \[H\]"),
        ({"weight": W.double()}, ValueError, "weight is .* float64"),
        ({"weight": W[:0], "residual": R[:, :0], "branch": None}, ValueError, "H at least 1"),
        ({"eps": 0.0}, ValueError, "eps is 0.0, expected a number above 0"),
        ({"eps": float("nan")}, ValueError, "eps is nan"),
        ({"backend": "cpu"}, ValueError, "has no add_rms_norm"),
    ],
)
def test_illegal_input_is_refused_in_a_line(run, changes, error, message):
    if run.device != "cpu" or run.backend != "reference":
        pytest.skip("checked before a backend is chosen")
    arguments = {"residual": R, "branch": B, "weight": W, "eps": EPS, "backend": run.backend} | changes
    with pytest.raises(error, match=message) as caught:
        kernels.add_rms_norm(**arguments)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("add_rms_norm: ")
