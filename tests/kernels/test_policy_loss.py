import math
from itertools import pairwise

import pytest
import torch

import kernels

ROWS, VOCABULARY = 61, 127
BOUNDS = [0, 1, 1, 20, 44, 61]


def policy_data(problem, spread: float = 0.3, seed: int = 3) -> dict[str, torch.Tensor]:
    """Per-row data around the policy's own log-probabilities; ignored rows hold NaN, which must not be read."""
    generator = torch.Generator().manual_seed(seed)
    exact = problem.leaves(torch.float64)
    with torch.no_grad():
        new = kernels.reference.linear_logprob(exact.hidden, exact.weight, exact.targets, bias=exact.bias).cpu().float()

    def near() -> torch.Tensor:
        return new + spread * torch.randn(len(new), generator=generator)

    data = {
        "advantages": torch.randn(len(new), generator=generator),
        "token_weights": torch.rand(len(new), generator=generator),
        "old_logprobs": near(),
        "ref_logprobs": near(),
        "behaviour_logprobs": near(),
    }
    data["advantages"][5] = 0
    data["token_weights"][6] = 0
    device = problem.hidden.device
    return {name: value.to(device).masked_fill(problem.targets < 0, math.nan) for name, value in data.items()}


SETTINGS = {
    "clip": {},
    "clip-asymmetric": {"clip_low": 0.1, "clip_high": 0.3},
    "dual-clip": {"clip_low": 0.05, "clip_high": 0.05, "dual_clip": 1.2},
    "reinforce": {"loss": "reinforce"},
    "likelihood": {"loss": "likelihood"},
    "k1": {"kl_coef": 0.3, "kl_estimator": "k1"},
    "k2": {"kl_coef": 0.3, "kl_estimator": "k2"},
    "k3": {"kl_coef": 0.3, "kl_estimator": "k3"},
    "entropy": {"entropy_coef": 0.2},
    "importance": {"is_cap": 1.1, "kl_coef": 0.3, "entropy_coef": 0.2},
    "sequence": {"ratio": "sequence", "clip_high": 2.0, "clip_low": 0.9},
    "sequence-importance": {"ratio": "sequence", "is_cap": 1.1, "clip_high": 2.0, "clip_low": 0.9, "kl_coef": 0.1},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("chunk", [ROWS, 25, 1], ids=["one-chunk", "many-chunks", "a-row-a-chunk"])
def test_matches_fp64(run, tools, settings, chunk):
    """With 25 rows a chunk all sequences fit a chunk but not together, with the last no sequence fits."""
    problem = tools.make_problem(ROWS, VOCABULARY, width=16, kind="masked", device=run.device)
    if run.interpreted and chunk != 25 and settings not in (SETTINGS["entropy"], SETTINGS["sequence-importance"]):
        pytest.skip("chunks know nothing of the loss: two losses are enough for the interpreter")
    if run.interpreted and chunk == 1:
        chunk = 16  # still too few for a sequence
    workspace = tools.workspace_for(run, problem, chunk)
    settings = settings | {"cu_seqlens": torch.tensor(BOUNDS, dtype=torch.int32, device=run.device)}
    data = policy_data(problem)
    own, exact = problem.leaves(), problem.leaves(torch.float64)
    found = kernels.linear_policy_loss(
        own.hidden, own.weight, own.targets, bias=own.bias, backend=run.backend, workspace_gib=workspace,
        **data, **settings,
    )  # fmt: skip
    doubles = {name: value.double() for name, value in data.items()}
    weights = doubles["token_weights"].requires_grad_()
    truth = kernels.reference.linear_policy_loss(
        exact.hidden, exact.weight, exact.targets, bias=exact.bias, **doubles, **settings
    )
    assert found.loss.dtype == torch.float32 and found.loss.shape == ()
    assert found.loss.item() == pytest.approx(truth.item(), rel=1e-5, abs=1e-5)
    (unweighted,) = torch.autograd.grad(truth, weights, retain_graph=True)
    wanted = (weights * unweighted).detach().masked_fill(problem.targets < 0, 0)
    torch.testing.assert_close(found.losses.double(), wanted, rtol=1e-5, atol=1e-5)
    upstream = -1.7
    mine = torch.autograd.grad(found.loss * upstream, own.inputs)
    for value, exact_value in zip(mine, torch.autograd.grad(truth * upstream, exact.inputs), strict=True):
        assert tools.relative_error(value, exact_value) < run.gradient_rounding

    logprobs, entropy = kernels.reference.linear_logprob(
        exact.hidden, exact.weight, exact.targets, bias=exact.bias, return_entropy=True
    )
    torch.testing.assert_close(found.logprobs.double(), logprobs.detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(found.entropy.double(), entropy.detach(), rtol=0, atol=1e-5)
    ignored = problem.targets < 0
    assert (found.ratio[ignored] == 1).all() and not found.clipped[ignored].any() and not found.clamped.any()
    assert not any(value.requires_grad for value in found[1:])


@pytest.mark.parametrize("name", ["clip", "dual-clip", "importance", "sequence", "sequence-importance"])
def test_without_an_old_policy_it_is_the_trained_one(run, tools, name):
    """As in an update's only optimizer step: every ratio is 1, and importance weights are the new policy's."""
    problem = tools.make_problem(ROWS, VOCABULARY, width=16, kind="masked", device=run.device)
    workspace = tools.workspace_for(run, problem, 25)
    settings = SETTINGS[name] | {"cu_seqlens": torch.tensor(BOUNDS, dtype=torch.int32, device=run.device)}
    data = policy_data(problem)
    del data["old_logprobs"]
    own, exact = problem.leaves(), problem.leaves(torch.float64)
    found = kernels.linear_policy_loss(
        **own.arguments(), backend=run.backend, workspace_gib=workspace, **data, **settings
    )
    doubles = {name: value.double() for name, value in data.items()}
    old = tools.exact_logprobs(problem).double()
    truth = kernels.reference.linear_policy_loss(**exact.arguments(), old_logprobs=old, **doubles, **settings)
    assert (found.ratio == 1).all() and not found.clipped.any()
    assert found.loss.item() == pytest.approx(truth.item(), rel=1e-5, abs=1e-5)
    exactly = torch.autograd.grad(truth, exact.inputs)
    for value, exact_value in zip(torch.autograd.grad(found.loss, own.inputs), exactly, strict=True):
        assert tools.relative_error(value, exact_value) < run.gradient_rounding
    with torch.no_grad():
        again = kernels.linear_policy_loss(**own.arguments(), backend=run.backend, **data, **settings)
    assert again.loss.item() == pytest.approx(truth.item(), rel=1e-5, abs=1e-5)


def test_a_sequence_longer_than_any_least_chunk(run, tools):
    """Some backends' chunks hold a tile of rows at least: two thousand rows are too many for the least workspace."""
    if run.interpreted:
        pytest.skip("too slow in the interpreter")
    rows = 2100
    problem = tools.make_problem(rows, VOCABULARY, width=16, device=run.device)
    bounds = torch.tensor([0, 50, 2090, rows], device=run.device)
    data = policy_data(problem, spread=0.001)
    own, exact = problem.leaves(), problem.leaves(torch.float64)
    settings = {"cu_seqlens": bounds, "ratio": "sequence", "entropy_coef": 0.1}
    found = kernels.linear_policy_loss(
        **own.arguments(), **data, **settings, backend=run.backend, workspace_gib=tools.workspace_for(run, problem, 1)
    )
    doubles = {name: value.double() for name, value in data.items()}
    truth = kernels.reference.linear_policy_loss(**exact.arguments(), **doubles, **settings)
    assert found.loss.item() == pytest.approx(truth.item(), rel=1e-4)
    exactly = torch.autograd.grad(truth, exact.inputs)
    for value, exact_value in zip(torch.autograd.grad(found.loss, own.inputs), exactly, strict=True):
        assert tools.relative_error(value, exact_value) < 1e-4  # the ratio is exp of a sum of 2040 rounded numbers


def test_no_rows(run, tools):
    problem = tools.make_problem(0, VOCABULARY, device=run.device).leaves()
    empty = torch.zeros(0, device=run.device)
    for ratio in ("token", "sequence"):
        found = kernels.linear_policy_loss(
            problem.hidden, problem.weight, problem.targets, advantages=empty, token_weights=empty, old_logprobs=empty,
            cu_seqlens=torch.tensor([0], device=run.device), ratio=ratio, backend=run.backend,
        )  # fmt: skip
        found.loss.backward()
        assert found.loss.item() == 0 and found.logprobs.shape == (0,)
        assert problem.weight.grad.shape == problem.weight.shape and (problem.weight.grad == 0).all()


def two_tokens(run, logprob: float, **settings):
    """Two rows over two tokens whose target has the given log-probability; d loss/d bias[target] is c·(1 − p)."""
    bias = torch.tensor([logprob - math.log1p(-math.exp(logprob)), 0.0], device=run.device, requires_grad=True)
    hidden, weight = torch.zeros(2, 1, device=run.device), torch.zeros(2, 1, device=run.device)
    rows = {name: torch.tensor(value, device=run.device) for name, value in settings.items() if isinstance(value, list)}
    found = kernels.linear_policy_loss(
        hidden, weight, torch.tensor([0, 0], device=run.device), bias=bias, backend=run.backend, **(settings | rows)
    )
    found.loss.backward()
    return found, bias.grad[0].item() / (1 - math.exp(logprob))


def test_clip_by_hand(run):
    new = math.log(0.4)
    old = [new - math.log(1.5), new - math.log(0.5)]  # ratios 1.5 and 0.5
    # Row 1 has a negative advantage and a small ratio: both rows sit on the clipped branch.
    found, slope = two_tokens(run, new, advantages=[2.0, -3.0], token_weights=[0.25, 0.5], old_logprobs=old)
    assert found.loss.item() == pytest.approx(0.25 * -1.2 * 2 + 0.5 * 0.8 * 3)
    assert found.clipped.tolist() == [True, True] and slope == 0
    assert found.ratio.tolist() == pytest.approx([1.5, 0.5])
    # With the signs turned the minimum is the plain one, and its slope −r·A·w.
    found, slope = two_tokens(run, new, advantages=[-2.0, 3.0], token_weights=[0.25, 0.125], old_logprobs=old)
    assert found.loss.item() == pytest.approx(0.25 * 1.5 * 2 - 0.125 * 0.5 * 3)
    assert found.clipped.tolist() == [False, False]
    assert slope == pytest.approx(0.25 * 1.5 * 2 - 0.125 * 0.5 * 3, rel=1e-5)


def test_dual_clip_by_hand(run):
    new = math.log(0.4)
    old = [new - math.log(4.0), new - math.log(2.0)]
    rows = {"token_weights": [0.25, 0.5], "old_logprobs": old}
    # Ratios 4 and 2 with negative advantages: the first row's loss stops at 3·|A|, with no slope left.
    found, slope = two_tokens(run, new, advantages=[-1.0, -2.0], dual_clip=3.0, **rows)
    assert found.loss.item() == pytest.approx(0.25 * 3 * 1 + 0.5 * 2 * 2)
    assert found.clipped.tolist() == [True, False]
    assert slope == pytest.approx(0.5 * 2 * 2, rel=1e-5)
    # A positive advantage knows only the plain clip.
    found, _ = two_tokens(run, new, advantages=[1.0, 2.0], dual_clip=3.0, **rows)
    assert found.loss.item() == pytest.approx(-0.25 * 1.2 - 0.5 * 1.2 * 2)


def test_sequence_ratio_by_hand(run):
    new = math.log(0.4)
    old = [new - math.log(1.25), new - math.log(0.5)]  # the sequence's ratio is 0.625
    settings = {"ratio": "sequence", "cu_seqlens": torch.tensor([0, 2], device=run.device), "old_logprobs": old}
    found, slope = two_tokens(run, new, advantages=[2.0, -3.0], token_weights=[0.25, 0.5], **settings)
    assert found.ratio.tolist() == pytest.approx([0.625, 0.625])
    assert found.clipped.tolist() == [False, True]
    assert found.loss.item() == pytest.approx(-0.25 * 0.625 * 2 + 0.5 * 0.8 * 3)
    # The first token's loss moves with both tokens' log-probabilities, the clipped second's with none.
    assert slope == pytest.approx(2 * -0.25 * 0.625 * 2, rel=1e-5)


def test_importance_weight_by_hand(run):
    new = math.log(0.4)
    rows = {"advantages": [1.0, 2.0], "token_weights": [1.0, 1.0], "old_logprobs": [new, new]}
    behaviour = [new - math.log(3.0), new - math.log(0.5)]
    found, slope = two_tokens(run, new, behaviour_logprobs=behaviour, is_cap=2.0, loss="reinforce", **rows)
    assert found.loss.item() == pytest.approx(-(2.0 * 1 + 0.5 * 2) * new, rel=1e-5)
    assert slope == pytest.approx(-(2.0 * 1 + 0.5 * 2), rel=1e-5)


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_log_ratio_is_clamped_with_zero_gradient(run, ratio):
    new = math.log(0.4)
    settings = {"ratio": ratio, "cu_seqlens": torch.tensor([0, 1, 2], device=run.device)}
    found, slope = two_tokens(
        run, new, advantages=[-1.0, -1.0], token_weights=[1.0, 0.0], old_logprobs=[new - 25, new - 19], **settings
    )
    assert found.clamped.tolist() == [True, False]
    assert found.ratio.tolist() == pytest.approx([math.exp(20), math.exp(19)], rel=1e-5)
    assert slope == 0
    # Below −20 with a positive advantage the plain branch is the minimum: without the clamp it would have a slope.
    found, slope = two_tokens(
        run, new, advantages=[1.0, 1.0], token_weights=[1.0, 0.0], old_logprobs=[new + 25, new], **settings
    )
    assert found.clamped.tolist() == [True, False] and slope == 0
    # k3 as well: exp stops, δ goes on.
    found, slope = two_tokens(
        run, new, advantages=None, token_weights=[1.0, 0.0], ref_logprobs=[new + 30, new], loss="likelihood",
        kl_coef=1.0, **settings,
    )  # fmt: skip
    assert found.clamped.tolist() == [True, False]
    assert found.loss.item() == pytest.approx(math.exp(20) - 1 - 30 - new, rel=1e-5)
    assert slope == pytest.approx(-1 + 1, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_gradient_against_a_bandit(run, estimator):
    """In expectation over the policy, k1's and k2's gradient is that of KL(π‖ref); k3's is that of KL(ref‖π)."""
    logits = torch.tensor([0.4, -0.3, 1.1], dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.tensor([-0.2, 0.5, 0.3], dtype=torch.float64), 0)
    logp = torch.log_softmax(logits, 0)
    forward_kl = (logp.exp() * (logp - ref)).sum()
    divergence = (ref.exp() * (ref - logp)).sum() if estimator == "k3" else forward_kl
    (exact,) = torch.autograd.grad(divergence, logits, retain_graph=True)

    bias = logits.detach().float().to(run.device).requires_grad_()
    rows = {"token_weights": logp.detach().exp().float().to(run.device), "ref_logprobs": ref.float().to(run.device)}
    zeros = torch.zeros(3, device=run.device)
    found = kernels.linear_policy_loss(
        torch.zeros(3, 1, device=run.device), torch.zeros(3, 1, device=run.device), torch.arange(3, device=run.device),
        advantages=zeros, loss="reinforce", kl_coef=1.0, kl_estimator=estimator, bias=bias, backend=run.backend, **rows,
    )  # fmt: skip
    found.loss.backward()
    torch.testing.assert_close(bias.grad.cpu().double(), exact, rtol=0, atol=1e-6)
    assert exact.abs().max() > 0.05
    if estimator != "k2":  # k2 is biased as a value
        assert found.loss.item() == pytest.approx(forward_kl.item(), abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_policy_that_is_its_reference_gets_no_gradient(run, estimator):
    """The two log-probabilities come from different passes, so that they may differ by rounding."""
    new = math.log(0.4)
    settings = {"advantages": [0.0, 0.0], "token_weights": [1.0, 1.0], "loss": "reinforce", "kl_coef": 1.0}
    found, slope = two_tokens(run, new, ref_logprobs=[new + 1e-6, new - 5e-7], kl_estimator=estimator, **settings)
    assert slope == 0 and found.loss.item() == 0
    found, slope = two_tokens(run, new, ref_logprobs=[new + 1e-4, new + 2e-4], kl_estimator=estimator, **settings)
    assert slope == pytest.approx(-3e-4, rel=0.02)


@pytest.mark.parametrize("nats", [60, -60, -120])
@pytest.mark.parametrize("share", ["one", "all"])
@pytest.mark.parametrize("loss", ["reinforce", "clip"])
def test_an_old_policy_far_away(run, tools, nats, share, loss):
    """Old log-probabilities guess where the logsumexp is; a row whose guess is useless must not poison dW."""
    problem = tools.make_problem(29, VOCABULARY, width=16, device=run.device)
    data = policy_data(problem)
    if share == "one":
        data["old_logprobs"][7] += nats
    else:
        data["old_logprobs"] += nats
    own, exact = problem.leaves(), problem.leaves(torch.float64)
    settings = {"loss": loss, "clip_high": 1e9, "entropy_coef": 0.1}
    found = kernels.linear_policy_loss(**own.arguments(), backend=run.backend, **data, **settings)
    doubles = {name: value.double() for name, value in data.items()}
    truth = kernels.reference.linear_policy_loss(**exact.arguments(), **doubles, **settings)
    mine = torch.autograd.grad(found.loss, own.inputs)
    exact_logprobs = tools.exact_logprobs(problem)
    torch.testing.assert_close(found.logprobs, exact_logprobs, rtol=0, atol=1e-5)
    assert found.clamped.sum() == (1 if share == "one" else (problem.targets >= 0).sum()) or loss == "reinforce"
    for value, exact_value in zip(mine, torch.autograd.grad(truth, exact.inputs), strict=True):
        assert tools.relative_error(value, exact_value) < run.gradient_rounding


def test_poisoned_memory_does_not_show(run, tools, poisoned):
    problem = tools.make_problem(ROWS, VOCABULARY, width=16, device=run.device).leaves()
    found = kernels.linear_policy_loss(
        **problem.arguments(), **policy_data(problem), ratio="sequence", entropy_coef=0.1, backend=run.backend,
        cu_seqlens=torch.tensor(BOUNDS, device=run.device), workspace_gib=tools.workspace_for(run, problem, 25),
    )  # fmt: skip
    found.loss.backward()
    for value in (*found, problem.hidden.grad, problem.weight.grad):
        assert value.isfinite().all()
    ignored = problem.targets < 0
    assert (problem.hidden.grad[ignored] == 0).all() and (found.logprobs[ignored] == 0).all()


def test_repeats_are_bitwise_equal(run, tools):
    torch.set_num_threads(2)
    problem = tools.make_problem(ROWS, VOCABULARY, dtype=torch.bfloat16, device=run.device)
    data = policy_data(problem)
    bounds = torch.tensor(BOUNDS, device=run.device)
    workspace = tools.workspace_for(run, problem, 25)

    def once():
        own = problem.leaves()
        found = kernels.linear_policy_loss(
            own.hidden, own.weight, own.targets, ratio="sequence", cu_seqlens=bounds, entropy_coef=0.1,
            backend=run.backend, workspace_gib=workspace, **data,
        )  # fmt: skip
        return [*found, *torch.autograd.grad(found.loss, own.inputs)]

    first = once()
    for _ in range(run.repeats):
        assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))


def test_split_into_microbatches_changes_nothing(run, tools):
    problem = tools.make_problem(ROWS, VOCABULARY, device=run.device)
    data = policy_data(problem)

    def gradient(cuts):
        own = problem.leaves()
        for start, stop in pairwise(cuts):
            part = {name: value[start:stop] for name, value in data.items()}
            found = kernels.linear_policy_loss(
                own.hidden[start:stop], own.weight, own.targets[start:stop], backend=run.backend, **part
            )
            found.loss.backward()
        return own.weight.grad, own.hidden.grad

    for whole, split in zip(gradient([0, ROWS]), gradient([0, 1, 30, ROWS]), strict=True):
        torch.testing.assert_close(whole, split, rtol=0, atol=1e-6)


def test_oracle_passes_gradcheck(tools):
    problem = tools.make_problem(8, 5, width=3).leaves(torch.float64)
    data = {name: value.double().nan_to_num() for name, value in policy_data(problem, spread=0.05).items()}
    for settings in (
        SETTINGS["clip"],
        SETTINGS["dual-clip"],
        SETTINGS["sequence"],
        SETTINGS["k2"],
        SETTINGS["k3"],
        SETTINGS["importance"],
    ):

        def function(hidden, weight, settings=settings):
            return kernels.reference.linear_policy_loss(
                hidden, weight, problem.targets, cu_seqlens=torch.tensor([0, 2, 8]), **data, **settings
            )

        assert torch.autograd.gradcheck(function, (problem.hidden, problem.weight))
