"""What is measured: a case is a loss at one shape on one kind of input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

DEFAULT_WORKSPACE_GIB = 1.25
SEQUENCE = 512
"""Tokens in a sequence wherever a case has sequences."""


class Kind(NamedTuple):
    """The matrix products that a loss cannot do without, each of T × H × V multiplications."""

    forward: int
    backward: int
    half_dead: bool = False
    workspace_gib: float = DEFAULT_WORKSPACE_GIB


KINDS = {
    "policy": Kind(forward=1, backward=2),
    "policy-half-dead": Kind(forward=1, backward=2, half_dead=True),
    "policy-small-workspace": Kind(forward=1, backward=2, workspace_gib=0.25),
    "likelihood": Kind(forward=1, backward=2),
    "dpo": Kind(forward=1, backward=2),
    "logprob": Kind(forward=1, backward=0),
    "kl": Kind(forward=2, backward=0),
    "gae": Kind(forward=0, backward=0),
}


@dataclass(frozen=True)
class Case:
    """One line of the plan; every implementation that knows its kind is measured on it."""

    name: str
    T: int
    H: int = 0
    V: int = 0
    inputs: str = "flat"
    dtype: str = "bfloat16"

    @property
    def kind(self) -> Kind:
        """What the loss costs."""
        return KINDS[self.name]

    @property
    def id(self) -> str:
        """Names the case on the command line (``-k``)."""
        head = f"H{self.H}-V{self.V}-{self.inputs}-{self.dtype}" if self.V else self.dtype
        return f"{self.name}-T{self.T}-{head}"

    @property
    def live_rows(self) -> int:
        """Rows whose gradient is not zero (all of them where there is none)."""
        return self.T // 2 if self.kind.half_dead else self.T

    @property
    def flops(self) -> int:
        """Floating-point operations of the products that are needed: dead rows need no backward product."""
        return 2 * self.H * self.V * (self.kind.forward * self.T + self.kind.backward * self.live_rows)

    @property
    def cost(self) -> float:
        """About how many H100 seconds the case takes, all implementations together: start-up and compiling, calls."""
        return 10 + 150 * self.flops / 6e14


HEADS = [(width, vocabulary) for vocabulary in (32000, 128256, 151936) for width in (1024, 2048, 4096)]
LARGEST = HEADS[-3:]
SMALL_HEAD = (576, 49152)


def targets() -> list[Case]:
    """The table that issue 3 sets targets for, and the p → 1 inputs of its exactness rule."""
    cases = [Case("policy", 8192, *head) for head in (*LARGEST, SMALL_HEAD)]
    cases.append(Case("policy", 8192, *LARGEST[-1], inputs="peaked"))
    cases += [Case("policy-half-dead", 8192, *head) for head in LARGEST]
    cases.append(Case("policy-small-workspace", 8192, *LARGEST[-1]))
    cases += [Case("logprob", 8192, *head) for head in LARGEST]
    return [*cases, Case("dpo", 8192, *LARGEST[-1]), Case("kl", 8192, *LARGEST[1])]


def everything() -> list[Case]:
    """Every shape; contains :func:`targets`."""
    heads = [*HEADS, SMALL_HEAD]
    cases = [
        Case(name, 8192, *head, inputs=inputs)
        for name in ("policy", "likelihood", "logprob")
        for head in heads
        for inputs in ("flat", "peaked")
    ]
    cases += [Case("policy-half-dead", 8192, *head) for head in heads]
    cases += [Case(name, 8192, *head) for name in ("policy-small-workspace", "dpo", "kl") for head in LARGEST]
    cases += [Case(name, 65536, *LARGEST[1]) for name in ("policy", "likelihood", "logprob")]
    return [*cases, *(Case("gae", rows, dtype="float32") for rows in (8192, 65536))]


def small() -> list[Case]:
    """What a CPU measures."""
    cases = [
        Case(name, 512, *SMALL_HEAD, dtype=dtype)
        for name in ("policy", "policy-half-dead", "logprob")
        for dtype in ("bfloat16", "float32")
    ]
    return [*cases, Case("gae", 65536, dtype="float32")]


def shard(cases: list[Case], index: int, count: int) -> list[Case]:
    """Part ``index`` of ``count`` (from 1): about equal costs, and inputs of one shape together, compiled once.

    Raises:
        ValueError: there is no such part.
    """
    if not 1 <= index <= count:
        raise ValueError(f"shard {index}/{count}: expected 1/{max(count, 1)} to {max(count, 1)}/{max(count, 1)}")
    groups: dict[tuple[object, ...], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.name, case.T, case.H, case.V, case.dtype), []).append(case)
    loads = [0.0] * count
    chosen: list[Case] = []
    for group in sorted(groups.values(), key=lambda group: -sum(case.cost for case in group)):
        lightest = loads.index(min(loads))
        loads[lightest] += sum(case.cost for case in group)
        if lightest == index - 1:
            chosen += group
    return sorted(chosen, key=cases.index)


def parse_shard(text: str) -> tuple[int, int]:
    """``"2/5"`` → (2, 5).

    Raises:
        ValueError: not of that form.
    """
    index, separator, count = text.partition("/")
    if not (separator and index.isdecimal() and count.isdecimal()):
        raise ValueError(f"{text!r} is not of the form i/n, such as 2/5")
    return int(index), int(count)
