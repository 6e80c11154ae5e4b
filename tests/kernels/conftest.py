"""One suite for every backend: a new one is a name in BACKENDS."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import kernels
from kernels.dispatch import is_built

BACKENDS = [
    pytest.param(("reference", "cpu"), id="reference"),
    pytest.param(
        ("cpu", "cpu"), id="cpu", marks=pytest.mark.skipif(not is_built("cpu"), reason="kernels._cpu not built")
    ),
    pytest.param(("reference", "cuda"), id="reference-cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Thousands of tiny operations: on a busy machine their threads would mostly wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Run:
    """A backend on a device."""

    backend: str
    device: str


@pytest.fixture(params=BACKENDS)
def run(request: pytest.FixtureRequest) -> Run:
    backend, device = request.param
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return Run(backend, device)


@dataclass(frozen=True)
class Problem:
    """Inputs of a head, with one seed each."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    bias: Tensor | None = None

    def leaves(self, dtype: torch.dtype | None = None) -> "Problem":
        """Fresh leaves that require gradients, floating ones in ``dtype``."""

        def leaf(value: Tensor | None) -> Tensor | None:
            return None if value is None else value.detach().to(dtype or value.dtype).clone().requires_grad_()

        return replace(self, hidden=leaf(self.hidden), weight=leaf(self.weight), bias=leaf(self.bias))

    @property
    def inputs(self) -> list[Tensor]:
        return [value for value in (self.hidden, self.weight, self.bias) if value is not None]


def make_problem(
    rows: int,
    vocabulary: int,
    width: int = 48,
    dtype=torch.float32,
    kind: str = "flat",
    device: str = "cpu",
    seed: int = 0,
) -> Problem:
    """Logits that are flat, peaked on the target, all below −100, up to ±200 or masked by −inf columns."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocabulary, width, generator=generator) / width**0.5
    hidden = torch.randn(rows, width, generator=generator)
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    bias = None
    if kind == "peaked":
        hidden = 26 * weight[targets]
    elif kind == "negative":
        bias = torch.full((vocabulary,), -160.0)
    elif kind == "wide":
        hidden *= 200 / (hidden @ weight.t()).abs().max() if rows else 1
    elif kind == "masked":  # a block from column 0 on, the last column, and every third one; never a target
        bias = torch.randn(vocabulary, generator=generator)
        open_columns = torch.ones(vocabulary, dtype=torch.bool)
        open_columns[: vocabulary // 2] = False
        open_columns[::3] = False
        open_columns[-1] = vocabulary == 2
        bias[~open_columns] = float("-inf")
        choices = open_columns.nonzero().squeeze(1)
        targets = choices[torch.randint(len(choices), (rows,), generator=generator)]
    if rows > 4:
        targets[3] = -100
    problem = Problem(hidden.to(dtype), weight.to(dtype), targets, bias)
    moved = [None if value is None else value.to(device) for value in (*problem.inputs[:2], targets, bias)]
    return Problem(*moved)


def relative_error(value: Tensor, exact: Tensor) -> float:
    """‖value − exact‖ / ‖exact‖."""
    if exact.numel() == 0:
        return 0.0
    return float((value.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-300))


def logprob_gradients(problem: Problem, upstream: tuple[Tensor, Tensor], function, **settings) -> list[Tensor]:
    """Gradients of Σ upstream · (logprobs, entropy)."""
    logprobs, entropy = function(
        problem.hidden, problem.weight, problem.targets, bias=problem.bias, return_entropy=True, **settings
    )
    total = (logprobs * upstream[0].to(logprobs)).sum() + (entropy * upstream[1].to(entropy)).sum()
    return list(torch.autograd.grad(total, problem.inputs))


def eager_error(problem: Problem, upstream: tuple[Tensor, Tensor], exact: list[Tensor]) -> list[float]:
    """How far autograd through whole logits in the inputs' own dtype is from fp64."""
    own = problem.leaves()
    if own.bias is not None:  # eager torch has no fp32 bias on bf16 logits
        own = replace(own, bias=own.bias.detach().to(own.hidden.dtype).requires_grad_())
    found = logprob_gradients(own, upstream, kernels.reference.linear_logprob)
    return [relative_error(value, truth) for value, truth in zip(found, exact, strict=True)]


@pytest.fixture
def tools():
    """The helpers above, for tests in files that cannot import them."""

    class Tools:
        make_problem = staticmethod(make_problem)
        relative_error = staticmethod(relative_error)
        logprob_gradients = staticmethod(logprob_gradients)
        eager_error = staticmethod(eager_error)

    return Tools
