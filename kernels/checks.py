"""Illegal input raises here, before any work, naming the argument, its shape and what was expected.

Each function's file has the checks that are its alone. Shapes, dtypes and devices are checked where a call is made, and
while torch.compile traces it: a message is formatted only where it is raised, as reading a size into a string would tie
the graph to it. Values of tensors are checked by :func:`check_values` and :func:`read_bounds` inside the ops.
"""

import os
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INDICES = (torch.int32, torch.int64)
LARGEST = torch.finfo(torch.float32).max
"""Numbers are used in fp32, where a larger one is infinite. Only bounds may be that."""


def describe(value: object) -> str:
    """A tensor by shape, dtype and device, a number or a name by its repr, anything else by its type."""
    if isinstance(value, Tensor):
        sparse = "" if value.layout == torch.strided else "sparse "
        return f"{sparse}{list(value.shape)} {short(value.dtype)} on {value.device}"
    return repr(value) if value is None or isinstance(value, (int, float, str)) else f"a {type(value).__name__}"


def short(dtype: torch.dtype) -> str:
    """A dtype without its module."""
    return str(dtype).removeprefix("torch.")


class Checker:
    """Raises for one function's arguments in one wording. ``expected`` is a format for ``parts``."""

    def __init__(self, function: str) -> None:
        self.function = function

    def require(self, condition: bool, name: str, value: object, expected: str, *parts: object) -> None:
        if not condition:
            raise ValueError(f"{self.function}: {name} is {describe(value)}, expected {expected.format(*parts)}")

    def tensor(self, name: str, value: object, dims: int, expected: str, *parts: object) -> None:
        if not isinstance(value, Tensor):
            message = f"{self.function}: {name} is {describe(value)}, expected a tensor {expected.format(*parts)}"
            raise TypeError(message)
        fits = value.dim() == dims and value.layout == torch.strided
        self.require(fits, name, value, expected, *parts)

    def row(self, name: str, value: Tensor, count: int, device: torch.device) -> None:
        """A floating tensor with one element a row."""
        expected = ("[{}] floating on {}", count, device)
        self.tensor(name, value, 1, *expected)
        fits = len(value) == count and value.is_floating_point() and value.device == device
        self.require(fits, name, value, *expected)

    def needed(self, name: str, value: object, expected: str, reason: str) -> None:
        """An optional argument that something else asks for."""
        self.require(value is not None, name, value, expected + " (needed by " + reason + ")")

    def no_tangents(self, *inputs: Tensor | None) -> None:
        """An op has no forward-mode derivative, and torch would give zero for it without a word."""
        if any(one is not None and unpack_dual(one).tangent is not None for one in inputs):
            raise RuntimeError(f"{self.function}: there is no forward-mode derivative (torch.func.jvp)")

    def choice(self, name: str, value: object, allowed: Iterable[str]) -> None:
        self.require(value in tuple(allowed), name, value, "one of " + ", ".join(map(repr, allowed)))

    def number(
        self, name: str, value: object, expected: str, minimum: float, strict: bool = False, finite: bool = True
    ) -> None:
        fits = isinstance(value, (int, float)) and (value > minimum if strict else value >= minimum)
        self.require(fits, name, value, expected)
        fits = not finite or (isinstance(value, (int, float)) and value <= LARGEST)
        self.require(fits, name, value, expected + ", finite in fp32")

    def backend(self, value: object) -> None:
        self.require(value is None or isinstance(value, str), "backend", value, "None or a name")

    def bounds(self, name: str, value: Tensor, device: torch.device) -> None:
        """cu_seqlens: sequence bounds. On the CPU they cost no read-back, on the rows' device perhaps one."""
        expected = ("[sequences + 1] int32 or int64 on {} or the CPU", device)
        self.tensor(name, value, 1, *expected)
        fits = len(value) > 0 and value.dtype in INDICES and value.device in (device, torch.device("cpu"))
        self.require(fits, name, value, *expected)


def reads_values(device: torch.device) -> bool:
    """Whether values are checked: on a GPU reading them back stalls the queue, so only under TANDEM_DEBUG=1."""
    return device.type == "cpu" or os.environ.get("TANDEM_DEBUG") == "1"


def check_weight(
    check: Checker, side: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, vocabulary: int | None = None
) -> None:
    """Check a head; ``side`` is what its arguments' names end in."""
    names = ", ".join(map(short, DTYPES))
    check.tensor("hidden" + side, hidden, 2, "[T, H] of " + names)
    fits = hidden.dtype in DTYPES and hidden.shape[1] > 0
    check.require(fits, "hidden" + side, hidden, "[T, H] of " + names + ", H at least 1")
    width, like_hidden = hidden.shape[1], short(hidden.dtype) + " on {} like hidden" + side

    size = "V at least 2" if vocabulary is None else "V like weight_p"
    expected = ("[V, {}] " + like_hidden + ", " + size, width, hidden.device)
    check.tensor("weight" + side, weight, 2, *expected)
    fits = weight.shape[1] == width and len(weight) >= 2 and vocabulary in (None, len(weight))
    check.require(
        fits and weight.dtype == hidden.dtype and weight.device == hidden.device, "weight" + side, weight, *expected
    )
    if bias is not None:
        expected = ("[{}] float32 or " + like_hidden, len(weight), hidden.device)
        check.tensor("bias" + side, bias, 1, *expected)
        fits = len(bias) == len(weight) and bias.dtype in (torch.float32, hidden.dtype) and bias.device == hidden.device
        check.require(fits, "bias" + side, bias, *expected)


def check_settings(
    check: Checker,
    hidden: Tensor,
    temperature: float | Tensor,
    softcap: float | None,
    workspace_gib: float,
    backend: str | None,
) -> None:
    """Check what shapes the logits of any head, the workspace, and that a backend is a name."""
    if isinstance(temperature, Tensor):
        check.row("temperature", temperature, len(hidden), hidden.device)
    else:
        check.number("temperature", temperature, "a number above 0 or a tensor with one a row", 1 / LARGEST)
    if softcap is not None:
        check.number("softcap", softcap, "None or a number above 0", 1 / LARGEST)
    check.number("workspace_gib", workspace_gib, "a number above 0", 0, strict=True)
    check.backend(backend)


def check_head(
    check: Checker,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int,
    workspace_gib: float,
    backend: str | None,
) -> None:
    """Check what every function over one head takes."""
    check_weight(check, "", hidden, weight, bias)
    expected = ("[{}] int64 on {}", len(hidden), hidden.device)
    check.tensor("targets", targets, 1, *expected)
    fits = len(targets) == len(hidden) and targets.dtype == torch.int64 and targets.device == hidden.device
    check.require(fits, "targets", targets, *expected)
    fits = isinstance(ignore_index, int) and -(2**63) <= ignore_index < 2**63
    check.require(fits, "ignore_index", ignore_index, "an integer of 64 bits")
    check_settings(check, hidden, temperature, softcap, workspace_gib, backend)
    check.no_tangents(hidden, weight, bias)


def check_values(
    function: str, targets: Tensor | None, vocabulary: int, ignore_index: int, inverse_temperature: Tensor
) -> None:
    """Check targets and temperatures where they are cheap to read."""
    if not reads_values(inverse_temperature.device):
        return
    check = Checker(function)
    if targets is not None:
        wrong = ((targets < 0) | (targets >= vocabulary)) & (targets != ignore_index)
        if wrong.any():
            first = int(wrong.nonzero()[0])
            expected = "0 to {} or ignore_index={}"
            check.require(False, f"targets[{first}]", int(targets[first]), expected, vocabulary - 1, ignore_index)
    fits = bool(((inverse_temperature > 0) & inverse_temperature.isfinite()).all())
    check.require(fits, "temperature", 1 / inverse_temperature, "only finite numbers above 0")


def read_bounds(function: str, cu_seqlens: Tensor, count: int) -> list[int]:
    """cu_seqlens on the host, checked."""
    bounds = cu_seqlens.tolist()
    fits = bounds[0] == 0 and bounds[-1] == count and bounds == sorted(bounds)
    Checker(function).require(fits, "cu_seqlens", cu_seqlens, "bounds rising from 0 to the {} rows: {}", count, bounds)
    return bounds
