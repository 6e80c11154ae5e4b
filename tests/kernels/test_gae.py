from itertools import pairwise

import pytest
import torch

import kernels

BOUNDS = [0, 1, 1, 8, 9, 40]


def brute_force(rewards, values, bounds, gamma, lam, bootstrap):
    """A_t = Σ_k (γλ)^k δ_{t+k}, each sum written out."""
    advantages = torch.zeros_like(rewards)
    for sequence, (start, stop) in enumerate(pairwise(bounds)):
        for t in range(start, stop):
            for k in range(t, stop):
                after = values[k + 1] if k + 1 < stop else bootstrap[sequence]
                advantages[t] += (gamma * lam) ** (k - t) * (rewards[k] + gamma * after - values[k])
    return advantages, advantages + values


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 1.0), (0.99, 0.0), (0.0, 0.5)])
@pytest.mark.parametrize("bootstrapped", [False, True])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_equals_a_double_loop(run, gamma, lam, bootstrapped, index_dtype):
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, BOUNDS[-1], generator=generator)
    bootstrap = torch.randn(len(BOUNDS) - 1, generator=generator) if bootstrapped else torch.zeros(len(BOUNDS) - 1)
    exact = brute_force(rewards.double(), values.double(), BOUNDS, gamma, lam, bootstrap.double())
    found = kernels.gae(
        rewards.to(run.device),
        values.to(run.device),
        torch.tensor(BOUNDS, dtype=index_dtype, device=run.device),
        gamma,
        lam,
        bootstrap=bootstrap.to(run.device) if bootstrapped else None,
        backend=run.backend,
    )
    for value, truth in zip(found, exact, strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.cpu().double(), truth, rtol=0, atol=5e-6)


def test_sequences_do_not_see_each_other(run):
    bounds = torch.tensor(BOUNDS, device=run.device)
    rewards, values = torch.randn(2, BOUNDS[-1], device=run.device)
    before, _ = kernels.gae(rewards, values, bounds, 1.0, 0.95, backend=run.backend)
    rewards[9:], values[9:] = torch.nan, torch.nan
    after, _ = kernels.gae(rewards, values, bounds, 1.0, 0.95, backend=run.backend)
    assert torch.equal(before[:9], after[:9])


@pytest.mark.parametrize("bounds", [[0], [0, 0]])
def test_no_tokens(run, bounds):
    empty = torch.zeros(0, device=run.device)
    advantages, returns = kernels.gae(
        empty, empty, torch.tensor(bounds, device=run.device), 1.0, 0.95, backend=run.backend
    )
    assert advantages.shape == returns.shape == (0,)
