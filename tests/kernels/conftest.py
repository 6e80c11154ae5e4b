"""One suite for every backend: a new one is a name in BACKENDS."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import kernels
from kernels import head
from kernels.dispatch import is_built, resolve
from kernels.logits import LogitsScanner


def _has_triton() -> bool:
    if not is_built("triton"):
        return False
    try:
        resolve("linear_logprob", torch.device("cuda"), "triton")
    except ValueError:  # the package is there, the function is not
        return False
    return True


BACKENDS = [
    pytest.param(("reference", "cpu"), id="reference"),
    pytest.param(
        ("cpu", "cpu"), id="cpu", marks=pytest.mark.skipif(not is_built("cpu"), reason="kernels._cpu not built")
    ),
    pytest.param(
        ("triton", "cpu"),
        id="triton-interpreter",
        marks=[
            pytest.mark.skipif(not _has_triton(), reason="kernels.triton not there"),
            pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles here"),
        ],
    ),
    pytest.param(("reference", "cuda"), id="reference-cuda", marks=pytest.mark.gpu),
    pytest.param(
        ("triton", "cuda"),
        id="triton",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not _has_triton(), reason="kernels.triton not there")],
    ),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Thousands of tiny operations: on a busy machine their threads would mostly wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """torch.empty gives NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Run:
    """A backend on a device."""

    backend: str
    device: str

    @property
    def interpreted(self) -> bool:
        """Triton's interpreter takes milliseconds for an operation of a program: tests cut their sizes down."""
        return (self.backend, self.device) == ("triton", "cpu")

    @property
    def repeats(self) -> int:
        """How often a result is compared with itself."""
        return 2 if self.interpreted else 20

    @property
    def gradient_rounding(self) -> float:
        """Relative error that fp32 gradients may have: Triton multiplies fp32 as three TF32 products."""
        return 2e-5 if self.backend == "triton" else 5e-6

    def has(self, function: str) -> bool:
        """Whether the backend has the function itself."""
        try:
            resolve(function, torch.device(self.device), self.backend)
        except ValueError:
            return False
        return True

    def keeps_logits(self) -> bool:
        """Whether it multiplies through kernels/logits.py, where torch's dispatcher sees the products."""
        scanner = resolve("linear_logprob", torch.device(self.device), self.backend).make_scanner
        return isinstance(scanner, type) and issubclass(scanner, LogitsScanner)


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

    def arguments(self) -> dict[str, Tensor | None]:
        return {"hidden": self.hidden, "weight": self.weight, "targets": self.targets, "bias": self.bias}


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


def workspace_for(run: Run, problem: Problem, rows: int) -> float:
    """The smallest workspace, in GiB, whose chunks hold so many rows (backends may have a least chunk)."""
    module = resolve("linear_logprob", problem.hidden.device, run.backend)
    with torch.no_grad():
        hidden, weight = problem.hidden.detach(), problem.weight.detach()
        scale = hidden.new_ones(len(hidden), dtype=torch.float32)
        valid = problem.targets >= 0
        task = head.Problem(hidden, head.Head(weight, problem.bias, scale, None), problem.targets.clamp(min=0), valid)
        low, high = 0, 1 << 33
        while high - low > 1:
            middle = (low + high) // 2
            if module.make_scanner(task, float(middle), (True, True, True)).chunk_rows >= rows:
                high = middle
            else:
                low = middle
    return high / 2**30


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


def exact_logprobs(problem: Problem) -> Tensor:
    """In fp64, then rounded."""
    double = problem.leaves(torch.float64)
    with torch.no_grad():
        return kernels.reference.linear_logprob(**double.arguments()).float()


@pytest.fixture
def tools():
    """The helpers above, for tests in files that cannot import them."""

    class Tools:
        make_problem = staticmethod(make_problem)
        workspace_for = staticmethod(workspace_for)
        relative_error = staticmethod(relative_error)
        logprob_gradients = staticmethod(logprob_gradients)
        eager_error = staticmethod(eager_error)
        exact_logprobs = staticmethod(exact_logprobs)

    return Tools
