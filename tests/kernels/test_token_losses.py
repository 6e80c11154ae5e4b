"""Every formula of kernels/token_losses.py, on every backend, against its second writing and against its paper."""

import itertools
import math
from itertools import pairwise

import pytest
import torch

import kernels
from kernels.coefficients import RATIOS
from kernels.token_losses import KL_ESTIMATORS, LOSSES

ROWS, VOCABULARY, WIDTH = 29, 31, 16
BOUNDS = [0, 1, 1, 12, 29]
BEYOND, WEIGHTLESS, IGNORED = 7, 15, 3


def make_rows(problem, seed: int = 5) -> dict[str, torch.Tensor]:
    """Ratios on both sides of every clip, one beyond the clamp, and rows that have no weight or are ignored."""
    generator = torch.Generator().manual_seed(seed)
    exact = problem.leaves(torch.float64)
    with torch.no_grad():
        new = kernels.reference.linear_logprob(exact.hidden, exact.weight, exact.targets).cpu().float()
    columns = {"advantages": torch.randn(ROWS, generator=generator)}
    columns["token_weights"] = torch.rand(ROWS, generator=generator) + 0.1
    for name in ("old_logprobs", "ref_logprobs", "behaviour_logprobs"):
        columns[name] = new + 0.5 * torch.randn(ROWS, generator=generator)
    columns["token_weights"][WEIGHTLESS] = 0
    columns["ref_logprobs"][BEYOND] += 25
    ignored = problem.targets.cpu() < 0
    assert ignored[IGNORED]
    return {name: column.masked_fill(ignored, math.nan).to(problem.hidden.device) for name, column in columns.items()}


COMBINATIONS = [
    (loss, estimator, ratio, dual_clip)
    for loss, estimator, ratio in itertools.product(LOSSES, KL_ESTIMATORS, RATIOS)
    for dual_clip in ((None, 1.3) if LOSSES[loss].dual_clip else (None,))
]
"""All of them; a loss that takes a dual clip with one and without."""


@pytest.mark.parametrize(("loss", "estimator", "ratio", "dual_clip"), COMBINATIONS)
def test_every_formula_is_its_second_writing(run, tools, loss, estimator, ratio, dual_clip):
    problem = tools.make_problem(ROWS, VOCABULARY, width=WIDTH, device=run.device)
    rows = make_rows(problem)
    if ratio == "token":  # the sum over a sequence would have no other row matter
        rows["old_logprobs"][BEYOND] += 25
    settings = {
        "loss": loss, "kl_coef": 0.3, "kl_estimator": estimator, "ratio": ratio, "dual_clip": dual_clip,
        "clip_low": 0.15, "clip_high": 0.25, "cu_seqlens": torch.tensor(BOUNDS),
        "is_cap": 1.2 if LOSSES[loss].advantages else None,
    }  # fmt: skip
    own, exact = problem.leaves(), problem.leaves(torch.float64)
    found = kernels.linear_policy_loss(**own.arguments(), **rows, **settings, backend=run.backend)
    doubles = {name: column.double() for name, column in rows.items()}
    truth = kernels.reference.linear_policy_loss(**exact.arguments(), **doubles, **settings)
    assert found.loss.item() == pytest.approx(truth.item(), rel=1e-5)
    exactly = torch.autograd.grad(truth, exact.inputs)
    for value, exact_value in zip(torch.autograd.grad(found.loss, own.inputs), exactly, strict=True):
        assert tools.relative_error(value, exact_value) < run.gradient_rounding

    assert found.clamped[BEYOND] == (ratio == "token" or estimator == "k3")
    assert not found.clamped[[IGNORED, WEIGHTLESS]].any()
    if LOSSES[loss].old:
        assert found.clipped.any() and not found.clipped.all() and not found.clipped[IGNORED]
        outside = (found.ratio < 1 - 0.15) | (found.ratio > 1 + 0.25)
        assert outside[found.clipped].all()
    else:
        assert not found.clipped.any()


@pytest.mark.parametrize("loss", LOSSES)
def test_the_trained_policy_is_its_own_old_one(run, tools, loss):
    """In an update's only step: the ratio is 1, and every loss has REINFORCE's gradient, of advantage 1 without any."""
    problem = tools.make_problem(ROWS, VOCABULARY, width=WIDTH, device=run.device)
    rows = make_rows(problem)
    rows = {name: rows[name] for name in ("advantages", "token_weights")}
    if not LOSSES[loss].advantages:
        rows["advantages"] = torch.ones(ROWS, device=run.device)
    gradients = []
    for name in (loss, "reinforce"):
        own = problem.leaves()
        found = kernels.linear_policy_loss(**own.arguments(), **rows, loss=name, backend=run.backend)
        gradients.append(torch.autograd.grad(found.loss, own.inputs))
        assert (found.ratio == 1).all() and not found.clipped.any()
    for value, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)


def written_out(problem):
    """Log-probabilities with autograd and nothing of ours, in fp64: (leaves, ``[ROWS]``)."""
    leaves = [value.detach().double().requires_grad_() for value in (problem.hidden, problem.weight)]
    every = torch.log_softmax(leaves[0] @ leaves[1].t(), 1)
    return leaves, every[torch.arange(ROWS), problem.targets.clamp(min=0)]


def assert_agrees(run, tools, problem, objective, leaves, arguments):
    """Loss and gradients are those of −objective."""
    own = problem.leaves()
    found = kernels.linear_policy_loss(**own.arguments(), **arguments, backend=run.backend)
    assert found.loss.item() == pytest.approx(-objective.item(), rel=1e-5)
    exactly = torch.autograd.grad(-objective, leaves)
    for value, exact_value in zip(torch.autograd.grad(found.loss, own.inputs), exactly, strict=True):
        assert tools.relative_error(value, exact_value) < run.gradient_rounding
    return found


def paper_problem(run, tools):
    """A problem, its sequences' rows without the ignored one, and data of one advantage a sequence."""
    problem = tools.make_problem(ROWS, VOCABULARY, width=WIDTH, device=run.device)
    rows = make_rows(problem)
    sequences = [[row for row in range(*bounds) if row != IGNORED] for bounds in pairwise([0, 1, 12, ROWS])]
    for rows_of, advantage in zip(sequences, (0.7, -1.3, 0.4), strict=True):
        rows["advantages"][rows_of] = advantage
    return problem, sequences, rows


def test_cispo_is_the_papers(run, tools):
    """arXiv 2506.13585, eq. 4 and 5: E[1/Σ|o_i| Σ_i Σ_t sg(r̂_t)·Â_t·log π(o_t)], r̂ = clip(r, 1 − ε_low, 1 + ε_high)."""
    problem, sequences, rows = paper_problem(run, tools)
    leaves, new = written_out(problem)
    tokens = sum(map(len, sequences))
    objective = torch.zeros((), dtype=torch.float64, device=run.device)
    for row in itertools.chain(*sequences):
        importance = torch.exp(new[row] - rows["old_logprobs"][row].double())
        weight = torch.clip(importance, 1 - 0.6, 1 + 0.2).detach()
        objective = objective + weight * rows["advantages"][row].double() * new[row] / tokens
    arguments = {
        "advantages": rows["advantages"], "old_logprobs": rows["old_logprobs"], "loss": "cispo", "clip_low": 0.6,
        "clip_high": 0.2, "token_weights": torch.full((ROWS,), 1 / tokens, device=run.device),
    }  # fmt: skip
    found = assert_agrees(run, tools, problem, objective, leaves, arguments)
    # What distinguishes it: a clipped token, which would have no gradient with PPO's clip, has one.
    assert found.clipped.any()
    own = problem.leaves()
    arguments["token_weights"] = found.clipped / tokens
    alone = kernels.linear_policy_loss(**own.arguments(), **arguments, backend=run.backend)
    (gradient,) = torch.autograd.grad(alone.loss, own.hidden)
    assert gradient[found.clipped].abs().sum(1).min() > 0


def test_the_mean_ratio_is_gspos(run, tools):
    """arXiv 2507.18071, eq. 5 and 7: 1/G Σ_i min(s_i·Â_i, clip(s_i)·Â_i), s_i = exp(1/|y_i| Σ_t log(π/π_old))."""
    problem, sequences, rows = paper_problem(run, tools)
    leaves, new = written_out(problem)
    weights = torch.zeros(ROWS, device=run.device)
    objective = torch.zeros((), dtype=torch.float64, device=run.device)
    ratios = []
    for rows_of in sequences:
        advantage = rows["advantages"][rows_of[0]].double()
        ratio = torch.exp((new[rows_of] - rows["old_logprobs"][rows_of].double()).sum() / len(rows_of))
        plain, clipped = ratio * advantage, torch.clip(ratio, 1 - 0.1, 1 + 0.5) * advantage
        objective = objective + torch.minimum(plain, clipped) / len(sequences)
        weights[rows_of] = 1 / (len(sequences) * len(rows_of))
        ratios += [ratio.item()] * len(rows_of)
    arguments = {
        "advantages": rows["advantages"], "old_logprobs": rows["old_logprobs"], "token_weights": weights,
        "ratio": "sequence_mean", "cu_seqlens": torch.tensor(BOUNDS), "clip_low": 0.1, "clip_high": 0.5,
    }  # fmt: skip
    found = assert_agrees(run, tools, problem, objective, leaves, arguments)
    assert found.ratio[list(itertools.chain(*sequences))].tolist() == pytest.approx(ratios, rel=1e-5)


def test_the_mean_ratio_weighs_a_sequence_for_importance(run, tools):
    """``is_cap`` caps exp of the mean of old − behaviour, the sequence's per-token weight."""
    problem, sequences, rows = paper_problem(run, tools)
    leaves, new = written_out(problem)
    objective = torch.zeros((), dtype=torch.float64, device=run.device)
    weights = []
    for rows_of in sequences:
        change = rows["old_logprobs"][rows_of].double() - rows["behaviour_logprobs"][rows_of].double()
        weights.append(change.mean().exp().clamp(max=1.02))
        objective = objective + (weights[-1] * rows["advantages"][rows_of].double() * new[rows_of]).sum()
    assert min(weights) < 1.02 and max(weights) == 1.02
    arguments = {
        **rows, "token_weights": torch.ones(ROWS, device=run.device), "loss": "reinforce", "is_cap": 1.02,
        "ratio": "sequence_mean", "cu_seqlens": torch.tensor(BOUNDS),
    }  # fmt: skip
    assert_agrees(run, tools, problem, objective, leaves, arguments)


def test_the_dual_clip_is_the_papers(run, tools):
    """arXiv 1912.09729, eq. 5: where Â < 0, E[max(min(r·Â, clip(r, 1 − ε, 1 + ε)·Â), c·Â)]; else PPO's."""
    problem, sequences, rows = paper_problem(run, tools)
    leaves, new = written_out(problem)
    tokens = sum(map(len, sequences))
    objective = torch.zeros((), dtype=torch.float64, device=run.device)
    for row in itertools.chain(*sequences):
        ratio, advantage = torch.exp(new[row] - rows["old_logprobs"][row].double()), rows["advantages"][row].double()
        term = torch.minimum(ratio * advantage, torch.clip(ratio, 1 - 0.2, 1 + 0.2) * advantage)
        if advantage < 0:
            term = torch.maximum(term, 1.4 * advantage)
        objective = objective + term / tokens
    arguments = {
        "advantages": rows["advantages"], "old_logprobs": rows["old_logprobs"], "dual_clip": 1.4,
        "token_weights": torch.full((ROWS,), 1 / tokens, device=run.device),
    }  # fmt: skip
    found = assert_agrees(run, tools, problem, objective, leaves, arguments)
    stopped = (found.ratio > 1.4) & (rows["advantages"] < 0)
    assert stopped.any() and found.clipped[stopped].all()


@pytest.mark.parametrize("ratio", ["sequence", "sequence_mean"])
@pytest.mark.parametrize("chunk", [18, 1], ids=["many-chunks", "no-sequence-fits"])
def test_chunks_do_not_show(run, tools, ratio, chunk):
    problem = tools.make_problem(ROWS, VOCABULARY, width=WIDTH, device=run.device)
    rows = make_rows(problem) | {"advantages": torch.ones(ROWS, device=run.device)}
    results = []
    for workspace in (1.0, tools.workspace_for(run, problem, max(chunk, 16) if run.interpreted else chunk)):
        own = problem.leaves()
        found = kernels.linear_policy_loss(
            **own.arguments(), **rows, ratio=ratio, cu_seqlens=torch.tensor(BOUNDS), workspace_gib=workspace,
            clip_high=9.0, clip_low=0.9, backend=run.backend,
        )  # fmt: skip
        results.append([*found, *torch.autograd.grad(found.loss, own.inputs)])
    for value, expected in zip(*results, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
