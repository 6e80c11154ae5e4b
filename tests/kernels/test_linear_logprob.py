import math

import pytest
import torch

import kernels

KINDS = ["flat", "peaked", "negative", "wide", "masked"]
FLOOR = {torch.float32: 3e-6, torch.bfloat16: 2e-3, torch.float16: 3e-4}
"""Where eager is by chance exact (a one-hot gradient): a few roundings of the inputs' dtype."""


def upstream(rows: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, generator=generator), torch.randn(rows, generator=generator)


SHAPES = [(7, 2), (7, 257), (129, 127), (127, 257), (1, 32000)]
LARGE = [(4097, 127), (7, 50257), (1, 151936), (2, 152064)]
HUGE = [(4097, 32000), (129, 151936), (127, 152064)]
CASES = [
    *((shape, kind) for shape in SHAPES for kind in KINDS),
    *((shape, kind) for shape in LARGE for kind in ("flat", "masked")),
    *(pytest.param(shape, kind, marks=pytest.mark.gpu) for shape in HUGE for kind in KINDS),
]


@pytest.mark.parametrize(("shape", "kind"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_matches_fp64(run, tools, shape, kind, dtype):
    """Log-probabilities, entropies and their gradients, in several chunks."""
    rows, vocabulary = shape
    if run.interpreted and rows * vocabulary > 2000:
        pytest.skip("too large for the interpreter")
    if shape in HUGE and run.device == "cpu":
        pytest.skip("too large for a CPU")
    problem = tools.make_problem(
        rows, vocabulary, 256 if shape in HUGE else 48, dtype=dtype, kind=kind, device=run.device
    )
    many_chunks = tools.workspace_for(run, problem, rows // 3 + 1)
    exact_problem, own = problem.leaves(torch.float64), problem.leaves()
    exact = kernels.reference.linear_logprob(
        exact_problem.hidden, exact_problem.weight, problem.targets, bias=exact_problem.bias, return_entropy=True
    )
    found = kernels.linear_logprob(
        own.hidden, own.weight, own.targets, bias=own.bias, return_entropy=True, backend=run.backend,
        workspace_gib=many_chunks,
    )  # fmt: skip
    # Against a product that is exact but for its fp32 sums, where |z| goes beyond what 1e-4 is promised for.
    logits = problem.hidden.float() @ problem.weight.float().t()
    product_error = (logits - exact_problem.hidden @ exact_problem.weight.t()).abs().max().item() if rows else 0
    tolerance = max(1e-4, 2.4 * product_error) if kind in ("wide", "negative") else 1e-4
    for value, truth in zip(found, exact, strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), truth, rtol=0, atol=tolerance)
    assert (found[0] <= 0).all()
    assert (found[1] >= 0).all()

    grads = upstream(rows)
    truth = tools.logprob_gradients(exact_problem, grads, kernels.reference.linear_logprob)
    mine = tools.logprob_gradients(own, grads, kernels.linear_logprob, backend=run.backend, workspace_gib=many_chunks)
    for value, exact_value, eager in zip(mine, truth, tools.eager_error(problem, grads, truth), strict=True):
        assert value.dtype in (dtype, torch.float32)
        assert tools.relative_error(value, exact_value) <= 2 * eager + FLOOR[dtype]


def test_gradient_survives_p_near_one(run, tools):
    """As p → 1 the error stays at the level of flat inputs, where eager bf16 loses the gradient altogether."""

    rows, vocabulary = (16, 257) if run.interpreted else (64, 5003)

    def errors(kind):
        problem = tools.make_problem(rows, vocabulary, dtype=torch.bfloat16, kind=kind, device=run.device)
        double = problem.leaves(torch.float64)
        with torch.no_grad():
            exact_logprobs = kernels.reference.linear_logprob(double.hidden, double.weight, double.targets)
        # Every row weighs the same: 1/(1 − p) with random signs.
        grads = (upstream(rows)[0].sign().to(run.device) / -torch.expm1(exact_logprobs), torch.zeros(rows))
        grads = (torch.where(problem.targets < 0, 0, grads[0]), grads[1].to(run.device))
        truth = tools.logprob_gradients(double, grads, kernels.reference.linear_logprob)
        found = tools.logprob_gradients(problem.leaves(), grads, kernels.linear_logprob, backend=run.backend)
        mine = [tools.relative_error(value, exact) for value, exact in zip(found, truth, strict=True)]
        return mine, tools.eager_error(problem, grads, truth)

    _, eager_flat = errors("flat")
    mine, eager_peaked = errors("peaked")
    assert min(eager_peaked) > 10 * max(eager_flat), "the input is not peaked enough to tell"
    assert all(error <= 2 * flat for error, flat in zip(mine, eager_flat, strict=True))


def test_logprob_keeps_relative_precision_near_zero(run, tools):
    problem = tools.make_problem(16, 257, kind="peaked", device=run.device)
    double = problem.leaves(torch.float64)
    truth = kernels.reference.linear_logprob(double.hidden, double.weight, double.targets)
    found = kernels.linear_logprob(problem.hidden, problem.weight, problem.targets, backend=run.backend)
    live = problem.targets >= 0
    assert truth[live].max() > -1e-6
    torch.testing.assert_close(found.double()[live], truth[live], rtol=1e-3, atol=0)


@pytest.mark.parametrize("rows", [0, 1, 7, 127, 129])
def test_any_row_count_writes_every_element(run, tools, rows):
    problem = tools.make_problem(rows, 127, device=run.device).leaves()
    logprobs, entropy = kernels.linear_logprob(
        problem.hidden, problem.weight, problem.targets, return_entropy=True, backend=run.backend,
        workspace_gib=tools.workspace_for(run, problem, 16),
    )  # fmt: skip
    assert logprobs.shape == entropy.shape == (rows,)
    ignored = problem.targets < 0
    assert (logprobs[ignored] == 0).all() and (entropy[ignored] == 0).all()
    assert (logprobs[~ignored] < 0).all() and (entropy[~ignored] > 0).all()
    (logprobs.sum() + entropy.sum()).backward()
    assert problem.hidden.grad.isfinite().all() and problem.weight.grad.isfinite().all()
    assert (problem.hidden.grad[ignored] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("per_row", [False, True])
def test_temperature_softcap_and_bias(run, tools, dtype, softcap, per_row):
    rows, vocabulary, width = 29, 127, 33
    problem = tools.make_problem(rows, vocabulary, width=width, dtype=dtype, device=run.device)
    bias = torch.randn(vocabulary, generator=torch.Generator().manual_seed(2)).to(run.device)
    problem = type(problem)(problem.hidden, problem.weight, problem.targets, bias)
    temperature = torch.linspace(0.5, 1.5, rows, device=run.device) if per_row else 0.6
    settings = {"softcap": softcap, "temperature": temperature}
    exact_settings = settings | {"temperature": temperature.double() if per_row else temperature}
    truth = tools.logprob_gradients(
        problem.leaves(torch.float64), upstream(rows), kernels.reference.linear_logprob, **exact_settings
    )
    found = tools.logprob_gradients(
        problem.leaves(), upstream(rows), kernels.linear_logprob, backend=run.backend,
        workspace_gib=tools.workspace_for(run, problem, 10), **settings,
    )  # fmt: skip
    for value, exact in zip(found, truth, strict=True):
        assert tools.relative_error(value, exact) < {4: run.gradient_rounding, 2: 6e-3}[dtype.itemsize]


@pytest.mark.parametrize("spread", [0.01, 0.1, 1.0])
def test_entropy_gradient_of_nearly_equal_words(run, tools, spread):
    """There log p + H is small: a logarithm of a bf16 probability would be all error."""
    rows = 9 if run.interpreted else 64
    problem = tools.make_problem(rows, 127, dtype=torch.bfloat16, device=run.device)
    problem = type(problem)(problem.hidden, problem.weight * spread, problem.targets)
    grads = (torch.zeros(rows, device=run.device), upstream(rows)[1].to(run.device))
    exact = tools.logprob_gradients(problem.leaves(torch.float64), grads, kernels.reference.linear_logprob)
    found = tools.logprob_gradients(problem.leaves(), grads, kernels.linear_logprob, backend=run.backend)
    for value, truth in zip(found, exact, strict=True):
        assert tools.relative_error(value, truth) < 6e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_softcap_with_targets_of_no_probability(run, tools, dtype):
    """Their E is zero in fp32, and its logarithm no logit."""
    problem = tools.make_problem(12, 127, dtype=dtype, device=run.device)
    targets = (problem.hidden.float() @ problem.weight.float().t()).argmin(1)
    problem = type(problem)(problem.hidden, problem.weight, targets)
    settings = {"softcap": 30.0, "temperature": torch.linspace(0.01, 0.5, 12, device=run.device)}
    exact_settings = settings | {"temperature": settings["temperature"].double()}
    logprobs = kernels.linear_logprob(problem.hidden, problem.weight, targets, backend=run.backend, **settings)
    assert logprobs.min() < -200
    exact = tools.logprob_gradients(
        problem.leaves(torch.float64), upstream(12), kernels.reference.linear_logprob, **exact_settings
    )
    found = tools.logprob_gradients(
        problem.leaves(), upstream(12), kernels.linear_logprob, backend=run.backend, **settings
    )
    for value, truth in zip(found, exact, strict=True):
        assert tools.relative_error(value, truth) < {4: 5e-5, 2: 6e-3}[dtype.itemsize]


@pytest.mark.parametrize("softcap", [1.0, 30.0, 1e3, 1e5])
def test_softcap_of_any_size_is_exact(run, tools, softcap):
    problem = tools.make_problem(17, 257, device=run.device)
    arguments = {**problem.arguments(), "hidden": problem.hidden * 5}
    double = {name: None if value is None else value.double() for name, value in arguments.items()}
    double["targets"] = problem.targets
    exact = kernels.reference.linear_logprob(**double, softcap=softcap)
    found = kernels.linear_logprob(**arguments, softcap=softcap, backend=run.backend)
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-5)


def test_the_smallest_temperatures_leave_numbers(run, tools):
    """Powers of two, which change no digit: what a scan masks out must stay finite when it is scaled."""
    problem = tools.make_problem(12, 127, dtype=torch.bfloat16, device=run.device)
    small = {**problem.arguments(), "hidden": problem.hidden * 2**-40}
    settings = {"return_entropy": True, "backend": run.backend}
    plain = kernels.linear_logprob(**problem.arguments(), **settings)
    found = kernels.linear_logprob(**small, temperature=2**-40, **settings)
    for value, expected in zip(found, plain, strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)


def test_dweight_error_does_not_grow_with_chunks(run, tools):
    """An accumulator in bf16 would lose small chunks: all rows pull the same columns the same way."""
    if run.interpreted:
        pytest.skip("too slow in the interpreter")
    problem = tools.make_problem(128, 127, dtype=torch.bfloat16, device=run.device)
    grads = (torch.ones(128, device=run.device), torch.zeros(128, device=run.device))
    truth = tools.logprob_gradients(problem.leaves(torch.float64), grads, kernels.reference.linear_logprob)[1]
    errors = []
    for chunk in (128, 40, 1):
        workspace = tools.workspace_for(run, problem, chunk)
        found = tools.logprob_gradients(
            problem.leaves(), grads, kernels.linear_logprob, backend=run.backend, workspace_gib=workspace
        )
        errors.append(tools.relative_error(found[1], truth))
    assert max(errors[1:]) <= 1.5 * errors[0]  # √2: the parts are rounded, and their sum


def test_chunking_changes_nothing_but_rounding(run, tools):
    problem = tools.make_problem(129, 127, device=run.device)
    one = kernels.linear_logprob(problem.hidden, problem.weight, problem.targets, backend=run.backend)
    many = kernels.linear_logprob(
        problem.hidden, problem.weight, problem.targets, backend=run.backend,
        workspace_gib=tools.workspace_for(run, problem, 30),
    )  # fmt: skip
    torch.testing.assert_close(one, many, rtol=0, atol=2e-6)


def test_non_contiguous_and_tied(run, tools):
    problem = tools.make_problem(31, 257, device=run.device)
    wide = torch.randn(31, 2 * 48, device=run.device)
    wide[:, ::2] = problem.hidden
    transposed = problem.weight.t().contiguous().t()
    assert not wide[:, ::2].is_contiguous() and not transposed.is_contiguous()
    plain = kernels.linear_logprob(problem.hidden, problem.weight, problem.targets, backend=run.backend)
    strided = kernels.linear_logprob(wide[:, ::2], transposed, problem.targets, backend=run.backend)
    torch.testing.assert_close(strided, plain, rtol=0, atol=2e-6)

    def tied(function, weight, **settings):
        ids = torch.arange(31, device=run.device)
        logprobs = function(torch.nn.functional.embedding(ids, weight), weight, problem.targets, **settings)
        return torch.autograd.grad(logprobs.sum(), weight)[0]

    exact = tied(kernels.reference.linear_logprob, problem.weight.double().requires_grad_())
    found = tied(kernels.linear_logprob, problem.weight.clone().requires_grad_(), backend=run.backend)
    assert tools.relative_error(found, exact) < run.gradient_rounding


def test_impossible_target_is_minus_infinity(run, tools):
    problem = tools.make_problem(8, 127, device=run.device)
    bias = torch.zeros(127, device=run.device)
    bias[problem.targets[0]] = float("-inf")
    logprobs, entropy = kernels.linear_logprob(
        problem.hidden, problem.weight, problem.targets, bias=bias, return_entropy=True, backend=run.backend
    )
    assert logprobs[0] == float("-inf") and entropy.isfinite().all()
    only = torch.full_like(bias, float("-inf"))
    only[problem.targets[0]] = 0
    logprobs, entropy = kernels.linear_logprob(
        problem.hidden[:1], problem.weight, problem.targets[:1], bias=only, return_entropy=True, backend=run.backend
    )
    assert logprobs.item() == 0 and entropy.item() == 0


def test_repeats_are_bitwise_equal(run, tools):
    torch.set_num_threads(2)
    rows = 31 if run.interpreted else 127
    problem = tools.make_problem(rows, 257, dtype=torch.bfloat16, kind="masked", device=run.device)
    workspace = tools.workspace_for(run, problem, 40)
    results = [
        tools.logprob_gradients(
            problem.leaves(), upstream(rows), kernels.linear_logprob, backend=run.backend, workspace_gib=workspace
        )
        for _ in range(run.repeats + 1)
    ]
    for later in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], later, strict=True))


@pytest.mark.parametrize("nats", [0, 30, -30, 60, -60, 85, -85, 120, -120, math.nan])
@pytest.mark.parametrize("share", ["one", "all"])
def test_a_wrong_anchor_changes_nothing(run, tools, nats, share):
    """A guess that is far off costs time; neither its own row nor its neighbours in dW may show it."""
    if run.interpreted and nats in (30, -30, 85, -60, 120):
        pytest.skip("one guess on each side of the limit, and one without sense, are enough for the interpreter")
    problem = tools.make_problem(13, 127, device=run.device)
    exact = tools.exact_logprobs(problem)
    chosen = problem.weight[problem.targets.clamp(min=0)]
    anchor = (problem.hidden * chosen).sum(1) - exact
    if share == "one":
        anchor[7] += nats
    else:
        anchor += nats
    truth = kernels.reference.linear_logprob(**problem.leaves(torch.float64).arguments(), return_entropy=True)
    found = kernels.linear_logprob(**problem.arguments(), return_entropy=True, anchor=anchor, backend=run.backend)
    for value, exact_value in zip(found, truth, strict=True):
        torch.testing.assert_close(value.double(), exact_value, rtol=0, atol=1e-5)
    grads = upstream(13)
    exact_grads = tools.logprob_gradients(problem.leaves(torch.float64), grads, kernels.reference.linear_logprob)
    mine = tools.logprob_gradients(problem.leaves(), grads, kernels.linear_logprob, anchor=anchor, backend=run.backend)
    for value, exact_value in zip(mine, exact_grads, strict=True):
        assert tools.relative_error(value, exact_value) < run.gradient_rounding


def test_poisoned_memory_does_not_show(run, tools, poisoned):
    """Every element of a result is written: fresh memory holds NaN here."""
    problem = tools.make_problem(37, 127, device=run.device).leaves()
    logprobs, entropy = kernels.linear_logprob(
        **problem.arguments(), return_entropy=True, backend=run.backend,
        workspace_gib=tools.workspace_for(run, problem, 16),
    )  # fmt: skip
    (logprobs.sum() + entropy.sum()).backward()
    for value in (logprobs, entropy, problem.hidden.grad, problem.weight.grad):
        assert value.isfinite().all()


def test_oracle_passes_gradcheck():
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, generator=generator, requires_grad=True)
        for shape in ((4, 3), (7, 3), (7,))
    )
    targets = torch.tensor([0, 6, -100, 3])

    def function(hidden, weight, bias):
        return kernels.reference.linear_logprob(
            hidden, weight, targets, bias=bias, return_entropy=True, temperature=0.7, softcap=5.0
        )

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))
