"""torch.compile takes the functions whole, for every row count at once, and changes no bit."""

import pytest
import torch

import kernels
from kernels.divergence import kl_op
from kernels.logprob import logprob_op

VOCABULARY, WIDTH = 61, 16
SIZES = (6, 10, 18)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(run, tools, rows):
    problem = tools.make_problem(rows, VOCABULARY, width=WIDTH, device=run.device, seed=rows).leaves()
    columns = torch.randn(3, rows, generator=torch.Generator().manual_seed(rows)).to(run.device)
    bounds = torch.tensor([0, 2, rows // 2, rows // 2, rows], device=run.device)
    return problem, [problem.hidden, problem.targets, *columns.unbind()], bounds


def logprob(weight, backend, bounds, hidden, targets, a, b, c):
    temperature = a.abs() + 0.5
    logprobs, entropy = kernels.linear_logprob(
        hidden, weight, targets, temperature=temperature, return_entropy=True, anchor=b, backend=backend
    )
    return (logprobs * b).sum() + (entropy * c).sum(), logprobs.detach()


def policy(weight, backend, bounds, hidden, targets, a, b, c):
    found = kernels.linear_policy_loss(
        hidden, weight, targets, advantages=a, token_weights=b, old_logprobs=c - 4, ref_logprobs=c - 5, kl_coef=0.1,
        entropy_coef=0.1, cu_seqlens=bounds, ratio="sequence", dual_clip=3.0, backend=backend,
    )  # fmt: skip
    return found.loss * 2, found.logprobs


def preference(weight, backend, bounds, hidden, targets, a, b, c):
    found = kernels.linear_preference_loss(
        hidden, weight, targets, cu_seqlens=bounds, ref_logprobs=c - 4, pair_weights=a[:2], backend=backend
    )
    return found.loss, found.margins


def divergence(weight, backend, bounds, hidden, targets, a, b, c):
    found = kernels.linear_kl(hidden, weight, hidden.detach() * 1.5, weight.detach(), backend=backend)
    return (found * a).sum(), found.detach()


def advantages(weight, backend, bounds, hidden, targets, a, b, c):
    found, returns = kernels.gae(a, b, bounds, 1.0, 0.95, backend=backend)
    return (found.unsqueeze(1) * (hidden * weight[0])).sum(), returns


FUNCTIONS = [logprob, policy, preference, divergence, advantages]


def both_passes(function, run, weight, arguments, bounds):
    total, other = function(weight, run.backend, bounds, *arguments)
    return [total.detach(), other, *torch.autograd.grad(total, (arguments[0], weight))]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda one: one.__name__)
def test_one_graph_for_every_row_count(run, tools, function):
    if function is divergence and not run.has("linear_kl"):
        pytest.skip("leaves linear_kl to the reference")
    weight = inputs(run, tools, SIZES[0])[0].weight
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in SIZES:
            _, arguments, bounds = inputs(run, tools, rows)
            plain = both_passes(function, run, weight, arguments, bounds)
            for argument in arguments:
                torch._dynamo.mark_dynamic(argument, 0)
            for value, expected in zip(both_passes(compiled, run, weight, arguments, bounds), plain, strict=True):
                assert torch.equal(value, expected)


def test_automatic_dynamic_shapes_settle_after_the_second_size(run, tools):
    if run.interpreted:
        pytest.skip("the graph is the same")
    weight = inputs(run, tools, SIZES[0])[0].weight
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(policy, fullgraph=True, backend=counter)
    for rows in (*SIZES, 33):
        _, arguments, bounds = inputs(run, tools, rows)
        both_passes(compiled, run, weight, arguments, bounds)
    assert counter.frame_count == 2


def test_a_second_backward_raises(run, tools):
    problem, arguments, bounds = inputs(run, tools, SIZES[0])
    compiled = torch.compile(policy, fullgraph=True, backend="aot_eager")
    total, _ = compiled(problem.weight, run.backend, bounds, *arguments)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward runs once"):
        total.backward()


def test_inductor(run, tools):
    """The generated code around the ops hands gradients over as they are."""
    if run.interpreted or (run.backend, run.device) == ("cpu", "cpu"):
        pytest.skip("the graph is the same")
    problem, arguments, bounds = inputs(run, tools, SIZES[1])
    plain = both_passes(policy, run, problem.weight, arguments, bounds)
    with torch._inductor.config.patch(force_disable_caches=True):  # they do not know an op that has changed
        compiled = both_passes(torch.compile(policy, fullgraph=True), run, problem.weight, arguments, bounds)
    for value, expected in zip(compiled, plain, strict=True):
        assert torch.equal(value, expected)


def test_registration():
    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    targets, scale = torch.tensor([0, 6, -100, 3, 1]), torch.ones(5)
    arguments = (hidden, weight, None, targets, scale, None, None, -100, 2.0**20, "reference")
    torch.library.opcheck(logprob_op, arguments)
    torch.library.opcheck(
        kl_op,
        (
            hidden,
            weight,
            None,
            hidden.detach() * 2,
            weight.detach(),
            None,
            scale,
            None,
            "reverse",
            2.0**20,
            "reference",
        ),
    )
