"""What only a GPU has room for: its allocator's word on memory, sizes past 32-bit offsets, a second device."""

import pytest
import torch

import kernels

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_gpu(run):
    if run.device != "cuda":
        pytest.skip("on a GPU only")


def peak_beyond(before: int) -> int:
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def start_counting() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def rows_of(problem, seed: int = 7) -> dict[str, torch.Tensor]:
    generator = torch.Generator(problem.hidden.device).manual_seed(seed)
    count, device = len(problem.hidden), problem.hidden.device
    return {
        "advantages": torch.randn(count, generator=generator, device=device),
        "token_weights": torch.rand(count, generator=generator, device=device),
    }


@pytest.mark.parametrize("workspace", [0.0625, 0.25])
@pytest.mark.parametrize("function", ["policy", "logprob"])
def test_memory_stays_within_the_workspace(run, tools, workspace, function):
    """Besides the gradients, of which an fp32 sum of dW is part, and a few numbers a row."""
    rows, vocabulary, width = 8192, 32000, 512
    problem = tools.make_problem(rows, vocabulary, width, dtype=torch.bfloat16, device=run.device).leaves()
    data = rows_of(problem)

    def once():
        settings = {"workspace_gib": workspace, "backend": run.backend}
        if function == "policy":
            kernels.linear_policy_loss(**problem.arguments(), **data, loss="reinforce", **settings).loss.backward()
        else:
            kernels.linear_logprob(**problem.arguments(), **settings).sum().backward()

    once()  # what libraries allocate once is not the call's
    problem.hidden.grad = problem.weight.grad = None
    before = start_counting()
    once()
    gradients = 2 * rows * width + (2 + 4) * vocabulary * width
    assert peak_beyond(before) <= workspace * 2**30 + gradients + 200 * rows


def test_without_gradients_64_mib(run, tools):
    problem = tools.make_problem(8192, 151936, 256, dtype=torch.bfloat16, device=run.device)

    def once():
        return kernels.linear_logprob(**problem.arguments(), return_entropy=True, backend=run.backend)

    once()
    before = start_counting()
    once()
    assert peak_beyond(before) <= 64 * 2**20 + 200 * 8192


@pytest.mark.parametrize(
    ("rows", "vocabulary", "width"), [(70_001, 257, 32), (16_400, 152_064, 64)], ids=["T>65535", "T·V>2³¹"]
)
def test_past_the_limits_of_integers(run, tools, rows, vocabulary, width):
    problem = tools.make_problem(rows, vocabulary, width, dtype=torch.bfloat16, device=run.device).leaves()
    data = rows_of(problem)
    found = kernels.linear_policy_loss(
        **problem.arguments(), **data, loss="reinforce", entropy_coef=0.1, backend=run.backend
    )
    found.loss.backward()

    double = problem.leaves(torch.float64)
    logprobs = []
    for start in range(0, rows, 1024):
        part = slice(start, start + 1024)
        new, entropy = kernels.reference.linear_logprob(
            double.hidden[part], double.weight, double.targets[part], return_entropy=True
        )
        loss = -data["token_weights"][part] * (data["advantages"][part] * new + 0.1 * entropy)
        loss.sum().backward()
        logprobs.append(new.detach())
    torch.testing.assert_close(found.logprobs.double(), torch.cat(logprobs), rtol=0, atol=1e-4)
    assert tools.relative_error(problem.hidden.grad, double.hidden.grad) < 6e-3
    assert tools.relative_error(problem.hidden.grad[-100:], double.hidden.grad[-100:]) < 6e-3
    assert tools.relative_error(problem.weight.grad, double.weight.grad) < 6e-3
    with torch.no_grad():
        alone = kernels.linear_logprob(**problem.arguments(), backend=run.backend)
    torch.testing.assert_close(alone, found.logprobs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_transposed_operands_past_32_bit_offsets(run, tools, direction):
    """H·V ≥ 2³¹: rows and words side by side, one hidden unit 2²⁶ elements after the other."""
    rows, vocabulary, width = 37, 257, 34
    small = tools.make_problem(rows, vocabulary, width, dtype=torch.bfloat16, device=run.device)
    memory = torch.empty(width << 26, dtype=torch.bfloat16, device=run.device)
    weight = memory.as_strided((vocabulary, width), (1, 1 << 26)).copy_(small.weight)
    hidden = memory.as_strided((rows, width), (1, 1 << 26), 1024).copy_(small.hidden)

    def results(hidden, weight):
        hidden.requires_grad_()
        found = [
            kernels.linear_logprob(hidden, weight, small.targets, backend=run.backend),
            kernels.linear_kl(hidden, weight, -hidden, weight, direction=direction, backend=run.backend),
        ]
        return [*found, torch.autograd.grad(sum(one.sum() for one in found), hidden)[0]]

    for far, near in zip(results(hidden, weight), results(small.hidden, small.weight), strict=True):
        torch.testing.assert_close(far, near, rtol=1e-2, atol=1e-3)


def test_a_residual_stream_past_32_bit_offsets(run):
    rows, width = 1_100_000, 2048
    weight = torch.ones(width, dtype=torch.bfloat16, device=run.device)
    stream = torch.empty(rows, width, device=run.device).normal_().requires_grad_()
    _, normed = kernels.add_rms_norm(stream, None, weight, 1e-6, backend=run.backend)
    normed.backward(normed.detach())
    last = stream.detach()[-100:].clone().requires_grad_()
    _, alone = kernels.add_rms_norm(last, None, weight, 1e-6, backend=run.backend)
    alone.backward(alone.detach())
    assert torch.equal(normed[-100:], alone) and torch.equal(stream.grad[-100:], last.grad)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_a_device_that_is_not_current(run, tools):
    problem = tools.make_problem(37, 257, device="cuda:1").leaves()
    data = rows_of(problem)
    assert torch.cuda.current_device() == 0

    def once():
        found = kernels.linear_policy_loss(**problem.arguments(), **data, loss="reinforce", backend=run.backend)
        logprobs = kernels.linear_logprob(**problem.arguments(), backend=run.backend)
        return [logprobs, *torch.autograd.grad(found.loss + logprobs.sum(), problem.inputs)]

    elsewhere = once()
    with torch.cuda.device(1):
        here = once()
    assert all(torch.equal(a, b) for a, b in zip(elsewhere, here, strict=True))
    assert torch.cuda.current_device() == 0
