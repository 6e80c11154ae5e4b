import math

import pytest
import torch

import kernels

VOCABULARY = 127
LENGTHS = [7, 12, 3, 0, 0, 9, 20, 4, 0, 0, 5, 1]
"""Chosen, rejected, …: empty responses, a pair without tokens, and one of 24 rows."""
ROWS = sum(LENGTHS)


def pair_data(problem, spread: float = 1.0) -> dict[str, torch.Tensor]:
    """A reference around uniform, NaN where ignored; a pair without weight, a token without a target in a pair."""
    generator = torch.Generator().manual_seed(5)
    device = problem.hidden.device
    ref = -math.log(VOCABULARY) + spread * torch.randn(ROWS, generator=generator)
    weights = torch.rand(len(LENGTHS) // 2, generator=generator)
    weights[3] = 0
    return {
        "cu_seqlens": torch.tensor([0, *LENGTHS], device=device).cumsum(0),
        "ref_logprobs": ref.to(device).masked_fill(problem.targets < 0, math.nan),
        "pair_weights": weights.to(device),
    }


SETTINGS = {
    "sigmoid": {"beta": 0.3},
    "smoothed": {"beta": 0.3, "label_smoothing": 0.15},
    "ipo": {"loss": "ipo", "beta": 0.3},
    "hinge": {"loss": "hinge", "beta": 0.03},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("chunk", [ROWS, 28, 1], ids=["one-chunk", "many-chunks", "no-pair-fits"])
@pytest.mark.parametrize("bounds_on_cpu", [True, False])
def test_matches_fp64(run, tools, settings, chunk, bounds_on_cpu):
    if bounds_on_cpu and run.device == "cpu":
        pytest.skip("there is one device")
    problem = tools.make_problem(ROWS, VOCABULARY, width=16, kind="masked", device=run.device)
    if run.interpreted and chunk == 1:
        chunk = 16
    data = pair_data(problem)
    own, exact = problem.leaves(), problem.leaves(torch.float64)
    bounds = data["cu_seqlens"].cpu() if bounds_on_cpu else data["cu_seqlens"]
    found = kernels.linear_preference_loss(
        **own.arguments(), **(data | {"cu_seqlens": bounds.int()}), **settings, backend=run.backend,
        workspace_gib=tools.workspace_for(run, problem, chunk),
    )  # fmt: skip
    doubles = {name: value if name == "cu_seqlens" else value.double() for name, value in data.items()}
    weights = doubles["pair_weights"].requires_grad_()
    truth = kernels.reference.linear_preference_loss(**exact.arguments(), **doubles, **settings)
    assert found.loss.item() == pytest.approx(truth.item(), rel=1e-5, abs=1e-5)
    (unweighted,) = torch.autograd.grad(truth, weights, retain_graph=True)
    torch.testing.assert_close(found.losses.double(), (weights * unweighted).detach(), rtol=1e-5, atol=1e-5)
    upstream = -1.7
    mine = torch.autograd.grad(found.loss * upstream, own.inputs)
    for value, exact_value in zip(mine, torch.autograd.grad(truth * upstream, exact.inputs), strict=True):
        assert tools.relative_error(value, exact_value) < run.gradient_rounding

    torch.testing.assert_close(found.logprobs, tools.exact_logprobs(problem), rtol=0, atol=1e-5)
    log_ratio = (found.logprobs - data["ref_logprobs"]).nan_to_num()
    sums = torch.stack([part.sum() for part in log_ratio.split(LENGTHS)]) * settings["beta"]
    torch.testing.assert_close(found.chosen_rewards, sums[0::2], rtol=0, atol=1e-4)
    torch.testing.assert_close(found.rejected_rewards, sums[1::2], rtol=0, atol=1e-4)
    assert torch.equal(found.margins, found.chosen_rewards - found.rejected_rewards)
    assert not any(value.requires_grad for value in found[1:])


def test_dpo_by_hand(run):
    """Two tokens of vocabulary, one row a response: the target's bias is all that moves."""
    logprobs = [math.log(0.4), math.log(0.6)]
    bias = torch.tensor([math.log(0.4 / 0.6), 0.0], device=run.device, requires_grad=True)
    found = kernels.linear_preference_loss(
        torch.zeros(2, 1, device=run.device), torch.zeros(2, 1, device=run.device),
        torch.tensor([0, 1], device=run.device), bias=bias, cu_seqlens=torch.tensor([0, 1, 2]), beta=0.5,
        ref_logprobs=torch.tensor([-1.0, -1.0], device=run.device), pair_weights=torch.tensor([2.0], device=run.device),
        backend=run.backend,
    )  # fmt: skip
    margin = 0.5 * (logprobs[0] - logprobs[1])
    assert found.margins.item() == pytest.approx(margin, rel=1e-5)
    assert found.chosen_rewards.item() == pytest.approx(0.5 * (logprobs[0] + 1), rel=1e-5)
    assert found.loss.item() == pytest.approx(2 * math.log1p(math.exp(-margin)), rel=1e-5)
    found.loss.backward()
    # dΔ/db = (1 − p) + p = 1 for the first token's bias.
    assert bias.grad[0].item() == pytest.approx(-2 * 0.5 / (1 + math.exp(margin)), rel=1e-5)


def test_no_pairs(run, tools):
    problem = tools.make_problem(0, VOCABULARY, device=run.device).leaves()
    empty = torch.zeros(0, device=run.device)
    found = kernels.linear_preference_loss(
        **problem.arguments(), cu_seqlens=torch.tensor([0], device=run.device), ref_logprobs=empty, pair_weights=empty,
        backend=run.backend,
    )  # fmt: skip
    found.loss.backward()
    assert found.loss.item() == 0 and found.logprobs.shape == found.margins.shape == (0,)
    assert (problem.weight.grad == 0).all()


def test_margins_far_out_stay_finite(run, tools):
    problem = tools.make_problem(ROWS, VOCABULARY, width=16, device=run.device).leaves()
    for sign in (1, -1):
        data = pair_data(problem)
        data["ref_logprobs"][: LENGTHS[0]] = -4 + 1000 * sign
        found = kernels.linear_preference_loss(**problem.arguments(), **data, beta=1.0, backend=run.backend)
        gradients = torch.autograd.grad(found.loss, problem.inputs)
        assert found.loss.isfinite() and all(value.isfinite().all() for value in gradients)


def test_repeats_are_bitwise_equal_on_poisoned_memory(run, tools, poisoned):
    torch.set_num_threads(2)
    problem = tools.make_problem(ROWS, VOCABULARY, dtype=torch.bfloat16, device=run.device)
    data = pair_data(problem)
    workspace = tools.workspace_for(run, problem, 28)

    def once():
        own = problem.leaves()
        found = kernels.linear_preference_loss(**own.arguments(), **data, backend=run.backend, workspace_gib=workspace)
        return [*found, *torch.autograd.grad(found.loss, own.inputs)]

    first = once()
    assert all(value.isfinite().all() for value in first)
    for _ in range(run.repeats // 2):
        assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))


def test_oracle_passes_gradcheck(tools):
    problem = tools.make_problem(ROWS, 5, width=3).leaves(torch.float64)
    data = {name: value if name == "cu_seqlens" else value.double() for name, value in pair_data(problem).items()}
    for settings in SETTINGS.values():

        def function(hidden, weight, settings=settings):
            return kernels.reference.linear_preference_loss(hidden, weight, problem.targets, **data, **settings)

        assert torch.autograd.gradcheck(function, (problem.hidden, problem.weight))
