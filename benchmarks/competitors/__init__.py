"""The implementations: one module each, imported only when it is measured.

A module has ``prepare(case, inputs)``, which gives a function of the inputs that does the whole work once and returns
an :class:`Outcome`; it raises :class:`Unavailable` where the implementation cannot do the case. ``probe(inputs,
rows)``, where there is one, gives log-probabilities of a few rows for an implementation whose losses keep them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from torch import Tensor

from benchmarks.cases import Case

OURS, BARE, EAGER = "tandem", "bare", "eager"
CORE = (OURS, BARE, "bare-whole", EAGER)
"""Measured whatever the time; on a CPU nothing else is."""


class Outcome(NamedTuple):
    """What one call gave."""

    gradients: tuple[Tensor, ...] = ()
    logprobs: Tensor | None = None
    """``[T]``; None where the implementation only gives a loss."""


Run = Callable[[Any], Outcome]


class Unavailable(Exception):
    """There is nothing to measure, for a reason that belongs into the results."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail


class Entry(NamedTuple):
    """Where an implementation is, which cases it can do, and the package whose version is recorded."""

    module: str
    cases: frozenset[str]
    package: str | None = None

    def prepare(self, case: Case, inputs: Any) -> Run:
        """The function to measure."""
        return self._import().prepare(case, inputs)

    def probe(self, inputs: Any, rows: Tensor) -> Tensor | None:
        """Log-probabilities of some rows, outside the measured call."""
        probe = getattr(self._import(), "probe", None)
        return None if probe is None else probe(inputs, rows)

    def version(self) -> str | None:
        """Of the installed package."""
        try:
            return version(self.package) if self.package else None
        except PackageNotFoundError:
            return None

    def _import(self) -> Any:
        try:
            return import_module(f"benchmarks.competitors.{self.module}")
        except ImportError as error:
            raise Unavailable("not installed", str(error)) from error


POLICY = frozenset({"policy", "policy-half-dead"})
HEAD = POLICY | {"likelihood", "logprob", "dpo"}
COMPETITORS = {
    OURS: Entry("tandem", HEAD | {"policy-small-workspace", "kl", "gae"}, "tandem-rlhf"),
    BARE: Entry("bare", HEAD | {"policy-small-workspace", "kl"}),
    "bare-whole": Entry("bare_whole", HEAD),
    EAGER: Entry("eager", HEAD | {"kl", "gae"}),
    "torch.compile": Entry("compiled", HEAD | {"kl"}),
    "F.linear_cross_entropy": Entry("torch_linear", frozenset({"likelihood"})),
    "liger-ce": Entry("liger_ce", frozenset({"likelihood"}), "liger-kernel"),
    "liger-grpo": Entry("liger_grpo", POLICY, "liger-kernel"),
    "trl": Entry("trl_head", HEAD, "trl"),
    "cce": Entry("cce", frozenset({"likelihood"}), "cut-cross-entropy"),
    "quack": Entry("quack_ce", frozenset({"likelihood"}), "quack-kernels"),
}
