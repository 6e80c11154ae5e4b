"""Illegal input raises here, before any work, naming the argument, its shape and what was expected."""

import os

import torch
from torch import Tensor

from kernels.coefficients import KL_ESTIMATORS, LOSSES, RATIOS, PolicySpec, Rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def describe(value: object) -> str:
    """A tensor by shape, dtype and device, anything else by its repr."""
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')} on {value.device}"
    return repr(value)


class Checker:
    """Raises for one function's arguments in one wording."""

    def __init__(self, function: str) -> None:
        self.function = function

    def require(self, condition: bool, name: str, value: object, expected: str) -> None:
        if not condition:
            raise ValueError(f"{self.function}: {name} is {describe(value)}, expected {expected}")

    def tensor(self, name: str, value: object, expected: str, dims: int) -> Tensor:
        if not isinstance(value, Tensor):
            raise TypeError(f"{self.function}: {name} is {describe(value)}, expected a tensor {expected}")
        self.require(value.dim() == dims, name, value, expected)
        return value

    def row(self, name: str, value: object, count: int, device: torch.device) -> None:
        """A floating tensor with one element a row."""
        expected = f"[{count}] floating on {device}"
        tensor = self.tensor(name, value, expected, 1)
        fits = len(tensor) == count and tensor.is_floating_point() and tensor.device == device
        self.require(fits, name, value, expected)

    def choice(self, name: str, value: object, allowed: tuple[str, ...]) -> None:
        self.require(value in allowed, name, value, "one of " + ", ".join(map(repr, allowed)))

    def number(self, name: str, value: object, expected: str, minimum: float, strict: bool = False) -> None:
        fits = isinstance(value, (int, float)) and (value > minimum if strict else value >= minimum)
        self.require(fits, name, value, expected)

    def bounds(self, name: str, value: object, count: int, device: torch.device) -> None:
        """cu_seqlens: sequence bounds from 0 to the row count."""
        expected = f"[sequences + 1] int32 or int64 on {device}, rising from 0 to the {count} rows"
        tensor = self.tensor(name, value, expected, 1)
        fits = len(tensor) > 0 and tensor.dtype in (torch.int32, torch.int64) and tensor.device == device
        if fits and reads_values(device):
            fits = bool((tensor[0] == 0) & (tensor[-1] == count) & (tensor.diff() >= 0).all())
        self.require(fits, name, value, expected)


def reads_values(device: torch.device) -> bool:
    """Whether values are checked: on a GPU reading them back stalls the queue, so only under TANDEM_DEBUG=1."""
    return device.type == "cpu" or os.environ.get("TANDEM_DEBUG") == "1"


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
) -> None:
    """Check what every function over a head takes."""
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
    check.tensor("hidden", hidden, f"[T, H] of {names}", 2)
    check.require(hidden.dtype in DTYPES, "hidden", hidden, f"[T, H] of {names}")
    rows, width = hidden.shape
    like_hidden = f"{str(hidden.dtype).removeprefix('torch.')} on {hidden.device} like hidden"

    expected = f"[V, {width}] {like_hidden}, V at least 2"
    check.tensor("weight", weight, expected, 2)
    fits = weight.shape[1] == width and len(weight) >= 2
    check.require(fits and (weight.dtype, weight.device) == (hidden.dtype, hidden.device), "weight", weight, expected)
    vocabulary = len(weight)

    expected = f"[{rows}] int64 on {hidden.device}"
    check.tensor("targets", targets, expected, 1)
    fits = len(targets) == rows and targets.dtype == torch.int64 and targets.device == hidden.device
    check.require(fits, "targets", targets, expected)
    if reads_values(hidden.device):
        wrong = ((targets < 0) | (targets >= vocabulary)) & (targets != ignore_index)
        if wrong.any():
            first = int(wrong.nonzero()[0])
            expected = f"0 to {vocabulary - 1} or ignore_index={ignore_index}"
            check.require(False, f"targets[{first}]", int(targets[first]), expected)

    if bias is not None:
        expected = f"[{vocabulary}] float32 or {like_hidden}"
        check.tensor("bias", bias, expected, 1)
        fits = len(bias) == vocabulary and bias.dtype in (torch.float32, hidden.dtype) and bias.device == hidden.device
        check.require(fits, "bias", bias, expected)
    if isinstance(temperature, Tensor):
        check.row("temperature", temperature, rows, hidden.device)
        if reads_values(hidden.device):
            check.require(bool((temperature > 0).all()), "temperature", temperature, "only numbers above 0")
    else:
        check.number("temperature", temperature, "a number above 0 or a tensor with one a row", 0, strict=True)
    if softcap is not None:
        check.number("softcap", softcap, "None or a number above 0", 0, strict=True)
    check.number("workspace_gib", workspace_gib, "a number above 0", 0, strict=True)


def check_policy(check: Checker, spec: PolicySpec, rows: Rows, cu_seqlens: Tensor | None) -> None:
    """Check a policy loss's settings and per-row data; ``rows.valid`` gives the row count and device."""
    check.choice("loss", spec.loss, LOSSES)
    check.choice("kl_estimator", spec.kl_estimator, KL_ESTIMATORS)
    check.choice("ratio", spec.ratio, RATIOS)
    for name in ("clip_low", "clip_high", "kl_coef"):
        check.number(name, getattr(spec, name), "a number from 0", 0)
    check.number("entropy_coef", spec.entropy_coef, "a number", float("-inf"))

    count, device = len(rows.valid), rows.valid.device
    needed = {
        "token_weights": "always",
        "advantages": "" if spec.loss == "likelihood" else f"loss={spec.loss!r}",
        "old_logprobs": 'loss="clip"' if spec.loss == "clip" else "is_cap" if spec.is_cap is not None else "",
        "ref_logprobs": "kl_coef > 0" if spec.kl_coef > 0 else "",
        "behaviour_logprobs": "is_cap" if spec.is_cap is not None else "",
    }
    for name, reason in needed.items():
        value = getattr(rows, name)
        if reason and value is None:
            raise ValueError(f"{check.function}: {name} is None, expected [{count}] floating (needed by {reason})")
        if value is not None:
            check.row(name, value, count, device)
    if spec.is_cap is not None:
        check.number("is_cap", spec.is_cap, "None or a number above 0", 0, strict=True)
        check.require(spec.loss != "likelihood", "is_cap", spec.is_cap, 'None with loss="likelihood"')
    if spec.ratio == "sequence" and cu_seqlens is None:
        raise ValueError(f'{check.function}: cu_seqlens is None, expected [sequences + 1] (needed by ratio="sequence")')
    if cu_seqlens is not None:
        check.bounds("cu_seqlens", cu_seqlens, count, device)


def check_gae(
    rewards: Tensor, values: Tensor, cu_seqlens: Tensor, gamma: float, lam: float, bootstrap: Tensor | None
) -> None:
    """Check the arguments of :func:`kernels.gae`."""
    check = Checker("gae")
    check.tensor("rewards", rewards, "[T] float32", 1)
    check.require(rewards.dtype == torch.float32, "rewards", rewards, "[T] float32")
    count, device = len(rewards), rewards.device
    check.bounds("cu_seqlens", cu_seqlens, count, device)
    for name, value, size in (("values", values, count), ("bootstrap", bootstrap, len(cu_seqlens) - 1)):
        if name == "values" or value is not None:
            check.row(name, value, size, device)
            check.require(value is not None and value.dtype == torch.float32, name, value, f"[{size}] float32")
    for name, number in (("gamma", gamma), ("lam", lam)):
        check.number(name, number, "a number from 0 to 1", 0)
        check.require(number <= 1, name, number, "a number from 0 to 1")
