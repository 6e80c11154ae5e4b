"""What :mod:`benchmarks.cuda_trial` does on the GPU: ``python -m benchmarks.cuda_worker FOLDER ITEMS``.

FOLDER holds the module ``_cuda``; ITEMS is JSON, a list of ``[what, variant, H, V]`` or with a band behind V; what
is "check", "time" or "profile". Each gives a line of JSON. The process ends at the first error, after which a context
may be of no use.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

TOKENS = 8192
WARM_PAIRS, PAIRS = 2, 9
BURST_WIDTH, BURST_MILLISECONDS = 4096, 250
"""Here every kernel also runs so long by itself."""
BANDS = {"mainloop": 16, "scan": 16, "forward": 16, "dhidden": 16, "dweight": 8, "dweight_fp32": 8, "dweight_add": 8}
"""Rows of tiles of 128 rows that go through a column together."""
GLUON = "gluon_scan"
"""Today's scan, timed beside the variants."""
LOGITS = ("mainloop", "scan", "forward")
"""Kinds that multiply hidden states by the weight."""
CHECKS = [(128, 64, 192, 1), (300, 136, 1000, 2), (1000, 576, 3001, 16), (77, 40, 517, 3), (2048, 1024, 20000, 5)]
"""(T, H, V, band): less than a stage and H % 64 ≠ 0, tiles over each edge, V odd, one tile a block and a dozen."""


def kind_of(name: str) -> str:
    """What a variant computes."""
    return "scan" if name == GLUON else name.split("_turns")[0].split("_halves")[0]


def band_of(name: str, tile_rows: int) -> int:
    """In rows of a cluster's tiles."""
    rows = tile_rows * (2 if name.endswith("shareB") else 1)
    return max(1, BANDS[kind_of(name)] * 128 // rows)


class Matrix(NamedTuple):
    """A tensor with rows of ``pitch`` elements, of which the first ``shape[1]`` are the matrix."""

    tensor: Any
    rows: int
    columns: int

    @property
    def argument(self) -> tuple[int, int, int, int]:
        """As the binding wants it."""
        return self.tensor.data_ptr(), self.rows, self.columns, self.tensor.stride(0)


class Rows(NamedTuple):
    """What the scan knows of rows, ``[T]`` each."""

    inverse_temperature: Any
    anchor: Any
    target: Any


class Problem:
    """Operands for one T, H and V; ``seed`` for what is in them, ``spare`` columns behind E that nobody may write."""

    def __init__(self, tokens: int, width: int, vocabulary: int, seed: int, spare: int) -> None:
        self.T, self.H, self.V = tokens, width, vocabulary
        generator = torch.Generator("cuda").manual_seed(seed)

        def normal(rows: int, columns: int) -> Any:
            return torch.randn(rows, columns, device="cuda", generator=generator, dtype=torch.bfloat16)

        self.hidden = normal(tokens, width)
        self.weight = normal(vocabulary, width).mul_(width**-0.5)
        uniform = torch.rand(tokens, device="cuda", generator=generator)
        self.rows = Rows(
            0.5 + uniform,
            uniform.flip(0) + 8.0,
            torch.randint(vocabulary, (tokens,), device="cuda", generator=generator, dtype=torch.int32),
        )
        self.factor = uniform - 0.5
        self.pitch = (vocabulary + 7) // 8 * 8 + spare  # rows of E start at 16 bytes
        self.e = normal(tokens, self.pitch).sub_(2).exp_()


class Results:
    """Where the kernels write."""

    def __init__(self, problem: Problem) -> None:
        tokens, width, vocabulary = problem.T, problem.H, problem.V
        tiles = (vocabulary + 127) // 128
        sums = max(tiles * tokens, ((tokens + 63) // 64 + 1) * (tiles + 1) * 8)
        self.sums = torch.empty(2, sums, device="cuda")
        self.e = torch.empty(tokens + 1, problem.pitch, device="cuda", dtype=torch.bfloat16)
        self.dhidden = torch.empty(tokens + 1, width, device="cuda", dtype=torch.bfloat16)
        self.dweight = torch.empty(vocabulary + 1, width, device="cuda")
        self.dweight_bf16 = torch.empty(vocabulary + 1, width, device="cuda", dtype=torch.bfloat16)

    def poison(self) -> None:
        """NaN everywhere."""
        for tensor in (self.sums, self.e, self.dhidden, self.dweight, self.dweight_bf16):
            tensor.fill_(float("nan"))


def call(module: Any, name: str, problem: Problem, results: Results, band: int | None = None) -> None:
    """One launch on the current stream."""
    kind, tile = kind_of(name), module.describe(name)
    hidden = Matrix(problem.hidden, problem.T, problem.H)
    weight = Matrix(problem.weight, problem.V, problem.H)
    common: dict[str, Any] = {
        "band": band or band_of(name, tile["tile_rows"]),
        "programs": torch.cuda.get_device_properties(0).multi_processor_count,
        "stream": torch.cuda.current_stream().cuda_stream,
    }
    if kind in LOGITS:
        module.launch(
            name, hidden.argument, weight.argument, Matrix(results.e, problem.T, problem.V).argument,
            rows=problem.T, columns=problem.V, depth=problem.H,
            inverse_temperature=problem.rows.inverse_temperature.data_ptr(),
            anchor=problem.rows.anchor.data_ptr(), target=problem.rows.target.data_ptr(),
            total=results.sums[0].data_ptr(), weighted=results.sums[1].data_ptr(), **common,
        )  # fmt: skip
        return
    e = Matrix(problem.e, problem.T, problem.V)
    if kind == "dhidden":
        out = Matrix(results.dhidden, problem.T, problem.H)
        module.launch(
            name, e.argument, weight.argument, out.argument, rows=problem.T, columns=problem.H, depth=problem.V,
            factor=problem.factor.data_ptr(), **common,
        )  # fmt: skip
    else:
        out = Matrix(results.dweight_bf16 if kind == "dweight" else results.dweight, problem.V, problem.H)
        module.launch(
            name, e.argument, hidden.argument, out.argument, rows=problem.V, columns=problem.H, depth=problem.T,
            **common,
        )  # fmt: skip


def bare(kind: str, problem: Problem, results: Results) -> None:
    """cuBLAS's product of the same shape."""
    if kind in LOGITS:
        torch.mm(problem.hidden, problem.weight.t(), out=results.e[: problem.T, : problem.V])
    elif kind == "dhidden":
        torch.mm(problem.e[:, : problem.V], problem.weight, out=results.dhidden[: problem.T])
    elif kind != "dweight_add":
        torch.mm(problem.e[:, : problem.V].t(), problem.hidden, out=results.dweight_bf16[: problem.V])
    else:
        results.dweight_bf16[: problem.V].addmm_(problem.e[:, : problem.V].t(), problem.hidden)


def far(name: str, ours: Any, reference: Any, relative: float, absolute: Any) -> list[str]:
    """A line where they differ by more, or ours is not a number."""
    error = (ours.double() - reference.double()).abs()
    bound = relative * reference.double().abs() + absolute
    wrong = ~(error <= bound)
    if not wrong.any():
        return []
    first = [int(i) for i in wrong.nonzero()[0]]
    place = tuple(first)
    return [f"{name}: {int(wrong.sum())} of {wrong.numel()} wrong, first at {first}: {float(ours[place]):.6g}, "
            f"expected {float(reference[place]):.6g}"]  # fmt: skip


def tile_sums(matrix: Any, size: int) -> Any:
    """Sums over every ``size`` rows."""
    missing = -len(matrix) % size
    return torch.nn.functional.pad(matrix, (0, 0, 0, missing)).unflatten(0, (-1, size)).sum(1)


def check_once(module: Any, name: str, problem: Problem, band: int) -> list[str]:
    """What is wrong with a variant's results on one problem."""
    kind, tile = kind_of(name), module.describe(name)
    T, V = problem.T, problem.V
    copies = []
    for _ in range(2):
        results = Results(problem)
        results.poison()
        if kind == "dweight_add":
            results.dweight[:V] = 1.0
        call(module, name, problem, results, band)
        torch.cuda.synchronize()
        copies.append(results)
    results, wrong = copies[0], []
    written = {"mainloop": "sums", "scan": "e", "forward": "sums", "dhidden": "dhidden", "dweight": "dweight_bf16"}
    for attribute in {written.get(kind, "dweight"), "sums"}:
        one, two = getattr(copies[0], attribute), getattr(copies[1], attribute)
        if not torch.equal(one.nan_to_num(12345.0), two.nan_to_num(12345.0)):
            wrong.append(f"{attribute} differs from run to run")

    if kind == "mainloop":
        x, w = problem.hidden.double(), problem.weight.double()
        sizes = tile_sums(x.abs(), tile["tile_rows"]) @ tile_sums(w.abs(), tile["tile_columns"]).t()
        x, w = tile_sums(x, tile["tile_rows"]), tile_sums(w, tile["tile_columns"])
        count = len(x) * len(w) * tile["warps"]
        ours = results.sums[0, :count].view(len(x), len(w), tile["warps"]).double().sum(2)
        wrong += far("sum", ours, x @ w.t(), 0.0, 2e-5 * sizes)
    elif kind in ("scan", "forward"):
        z = problem.hidden.float() @ problem.weight.float().t()
        u = z * problem.rows.inverse_temperature[:, None] - problem.rows.anchor[:, None]
        e = u.exp().scatter_(1, problem.rows.target.long()[:, None], 0.0)
        columns = tile["tile_columns"]
        count = (V + columns - 1) // columns
        total, weighted = (results.sums[i, : count * T].view(count, T) for i in range(2))
        expected = tile_sums(e.double().t(), columns)
        wrong += far("total", total, expected, 1e-3, 1e-7)
        wrong += far("weighted", weighted, tile_sums((e * u).double().t(), columns), 1e-3, 1e-3 * expected)
        if not results.sums[0, count * T :].isnan().all():
            wrong.append("total: written past its end")
        if kind == "scan":
            wrong += far("E", results.e[:T, :V].float(), e, 6e-3, 1e-9)
            if not (results.e[:, V:].isnan().all() and results.e[T:].isnan().all()):
                wrong.append("E: written past its edge")
    elif kind == "dhidden":
        expected = problem.factor[:, None] * (problem.e[:, :V].float() @ problem.weight.float())
        wrong += far("dX", results.dhidden[:T].float(), expected, 0.01, 0.01 * float(expected.std()))
        if not results.dhidden[T:].isnan().all():
            wrong.append("dX: written past its edge")
    else:
        expected = problem.e[:, :V].float().t() @ problem.hidden.float() + (1.0 if kind == "dweight_add" else 0.0)
        dweight, error = (results.dweight_bf16, 0.01) if kind == "dweight" else (results.dweight, 1e-3)
        wrong += far("dW", dweight[:V].float(), expected, error, error * float(expected.std()))
        if not dweight[V:].isnan().all():
            wrong.append("dW: written past its edge")
    return wrong


def check(module: Any, name: str) -> dict[str, Any]:
    """Whether a variant is right."""
    wrong = []
    for seed, (tokens, width, vocabulary, band) in enumerate(CHECKS):
        problem = Problem(tokens, width, vocabulary, seed, spare=8)
        found = check_once(module, name, problem, band)
        wrong += [f"T={tokens} H={width} V={vocabulary}: {line}" for line in found]
    return {"right": not wrong, "wrong": wrong}


class Clock:
    """Keeps one size's problems between variants."""

    def __init__(self) -> None:
        self.size: tuple[int, int] | None = None
        self.problems: list[Problem] = []
        self.results: list[Results] = []

    def prepare(self, size: tuple[int, int]) -> None:
        """Two sets of inputs, one of results."""
        if self.size == size:
            return
        self.problems, self.results = [], []
        torch.cuda.empty_cache()
        self.problems = [Problem(TOKENS, *size, seed, spare=0) for seed in range(2)]
        self.results = [Results(self.problems[0])]
        self.results[0].dweight.zero_()
        self.results[0].dweight_bf16.zero_()
        self.size = size

    def time(self, module: Any, name: str, size: tuple[int, int], band: int | None = None) -> dict[str, Any]:
        """Milliseconds of a variant and of cuBLAS, and the median quotient of neighbours."""
        self.prepare(size)
        results, kind = self.results[0], kind_of(name)
        gluon = gluon_scan(self.problems, results) if name == GLUON else None

        def ours(turn: int) -> None:
            if gluon is not None:
                gluon(turn)
            else:
                call(module, name, self.problems[turn], results, band)

        def theirs(turn: int) -> None:
            bare(kind, self.problems[turn], results)

        pairs = []
        for index in range(WARM_PAIRS + PAIRS):
            taken = {}
            for label, run in (("bare", theirs), ("ours", ours))[:: 1 if index % 2 == 0 else -1]:
                start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                run(index % 2)
                stop.record()
                taken[label] = (start, stop)
            pairs.append(taken)
        torch.cuda.synchronize()
        times = {
            label: [taken[label][0].elapsed_time(taken[label][1]) for taken in pairs[WARM_PAIRS:]]
            for label in ("ours", "bare")
        }
        ratios = [a / b for a, b in zip(times["ours"], times["bare"], strict=True)]
        milliseconds = statistics.median(times["ours"])
        result = {
            "ms": milliseconds,
            "bare_ms": statistics.median(times["bare"]),
            "ratio": statistics.median(ratios),
            "ratio_least": min(ratios),
            "ratio_most": max(ratios),
            "tflops": 2e-9 * TOKENS * size[0] * size[1] / milliseconds,
        }
        if size[0] == BURST_WIDTH and band is None:
            result["burst"] = self.burst(ours, milliseconds)
            result["bare_burst"] = self.burst(theirs, result["bare_ms"])
        return result

    @staticmethod
    def burst(run: Callable[[int], None], milliseconds: float) -> dict[str, float]:
        """Milliseconds of one launch among many of its kind, where the card's power limit sets the clock."""
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        count = max(4, round(BURST_MILLISECONDS / milliseconds))
        began = time.time()
        start.record()
        for index in range(count):
            run(index % 2)
        stop.record()
        torch.cuda.synchronize()
        return {"ms": start.elapsed_time(stop) / count, "began": began, "ended": time.time()}


def gluon_scan(problems: list[Problem], results: Results) -> Any:
    """Today's scan in Gluon with E kept, as ``kernels.triton.hopper.products`` calls it; gives a call by turn."""
    from kernels.triton.hopper.mainloop import ROWS
    from kernels.triton.hopper.products import SCAN_COLUMNS, descriptor, scan_ring
    from kernels.triton.hopper.scan import anchored_scan

    T, H, V = problems[0].T, problems[0].H, problems[0].V
    ring, programs = scan_ring(H, True), torch.cuda.get_device_properties(0).multi_processor_count
    tiles = (V + SCAN_COLUMNS - 1) // SCAN_COLUMNS
    e = results.e[:T, :V]
    flags = []
    for problem in problems:
        flag = torch.zeros(T // 64, tiles, device="cuda", dtype=torch.int8)
        flag[torch.arange(T, device="cuda") // 64, problem.rows.target.long() // SCAN_COLUMNS] = 1
        flags.append(flag)

    def scan(turn: int) -> None:
        problem = problems[turn]
        temperature, anchor, target = problem.rows
        anchored_scan[(programs,)](
            descriptor(problem.hidden, ROWS.value, ring["BK"]), descriptor(problem.weight, SCAN_COLUMNS, ring["BK"]),
            descriptor(e, ROWS.value, SCAN_COLUMNS // 2), results.sums[0], results.e.stride(0), temperature, anchor,
            target, anchor, flags[turn], results.sums[0], results.sums[1], 1.0, T, V, H, BN=SCAN_COLUMNS, **ring,
            BIAS=False, SOFTCAP=False, STORE="bf16", num_warps=4,
        )  # fmt: skip

    scan(0)  # compiles
    return scan


def load(folder: str) -> Any:
    """The module that ``csrc/cuda/build.py`` left in ``folder``."""
    sys.path.insert(0, folder)
    import _cuda  # type: ignore[import-not-found]

    return _cuda


def work(folder: str, items: list[list[Any]]) -> None:
    """Do the items, a line of JSON each."""
    module, clock = load(folder), Clock()
    print(json.dumps({"ready": True}), flush=True)
    for what, name, width, vocabulary, *band in items:
        try:
            if what == "check":
                result = check(module, name)
            elif what == "time":
                result = clock.time(module, name, (width, vocabulary), *band)
            else:
                clock.prepare((width, vocabulary))
                for index in range(2):
                    bare(kind_of(name), clock.problems[index], clock.results[0])
                    call(module, name, clock.problems[index], clock.results[0])
                torch.cuda.synchronize()
                result = {}
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
        print(json.dumps(result), flush=True)
        if "error" in result:  # after which a context may be of no use
            os._exit(1)


if __name__ == "__main__":
    work(sys.argv[1], json.loads(sys.argv[2]))
