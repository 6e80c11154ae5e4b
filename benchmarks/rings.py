"""Time the Hopper kernels' ring variants against cuBLAS's product of the same shape: ``python -m benchmarks.rings``.

A development tool: it shows which BK, STAGES, BAND, LAG and BUFFERS belong in ``kernels/triton/hopper/products.py``.
The variants follow one another without a pause, as the products of a chunk do: an H100 lowers its clock after some
milliseconds of such work, and what is fastest cold need not be fastest then.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton

VOCABULARY, ROWS = 151936, 4096
SCAN_COLUMNS = 256
RINGS = ("STAGES", "BAND", "LAG", "BUFFERS", "BK")
SCANS = [
    (4, 16, 1, 1, 64),
    (4, 16, 2, 1, 64),
    (3, 16, 1, 2, 64),
    (8, 16, 2, 1, 32),
    (8, 16, 3, 1, 32),
    (8, 16, 4, 1, 32),
]
DHIDDENS = [(4, 8, 1), (4, 16, 1)]
DWEIGHTS = [(4, 8, 1, 1), (4, 16, 1, 1), (3, 8, 1, 2)]


class Chunk(NamedTuple):
    """One chunk's operands and results; E is what a scan made of hidden and weight."""

    hidden: torch.Tensor
    weight: torch.Tensor
    e: torch.Tensor
    dlogits: torch.Tensor
    dhidden: torch.Tensor
    dweight: torch.Tensor
    row: torch.Tensor
    anchor: torch.Tensor
    targets: torch.Tensor
    has_target: torch.Tensor
    sums: torch.Tensor
    source: torch.Tensor
    plan: torch.Tensor


def make_chunk(width: int) -> Chunk:
    """Flat logits of standard deviation 1."""
    from kernels.triton.hopper.products import output_columns

    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(ROWS, width, device="cuda", generator=generator).bfloat16()
    weight = (torch.randn(VOCABULARY, width, device="cuda", generator=generator) / width**0.5).bfloat16()
    targets = torch.randint(VOCABULARY, (ROWS,), device="cuda", generator=generator)
    tiles = triton.cdiv(VOCABULARY, SCAN_COLUMNS)
    has_target = torch.zeros(ROWS // 64, tiles, device="cuda", dtype=torch.int8)
    has_target[torch.arange(ROWS, device="cuda") // 64, targets // SCAN_COLUMNS] = 1
    whole_tiles = ROWS // 128 * triton.cdiv(width, output_columns(width))
    dlogits = (hidden @ weight.t()).softmax(1)
    dlogits *= torch.randn(ROWS, 1, device="cuda", generator=generator).bfloat16()
    return Chunk(
        hidden, weight, torch.empty_like(dlogits), dlogits, torch.empty_like(hidden), torch.zeros_like(weight),
        torch.ones(ROWS, device="cuda"), torch.full((ROWS,), 12.4, device="cuda"), targets.int(), has_target,
        torch.empty(2, tiles * ROWS, device="cuda"), torch.arange(ROWS, device="cuda", dtype=torch.int32),
        torch.tensor([ROWS, 0, whole_tiles, 1], device="cuda", dtype=torch.int32),
    )  # fmt: skip


def variants(chunk: Chunk) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """(kernel, variant, call); the call named "cuBLAS" of each kernel comes first."""
    from kernels.triton.hopper.dhidden import dhidden_product
    from kernels.triton.hopper.dweight import dweight_product
    from kernels.triton.hopper.products import b_descriptors, descriptor, output_columns
    from kernels.triton.hopper.scan import anchored_scan

    width = chunk.hidden.shape[1]
    grid = (torch.cuda.get_device_properties(0).multi_processor_count,)

    def ring(values: tuple[int, ...]) -> dict[str, int]:
        return dict(zip(RINGS, values, strict=False))

    def scan(values: tuple[int, ...], store: str) -> None:
        anchored_scan[grid](
            descriptor(chunk.hidden, 64, values[-1]), descriptor(chunk.weight, SCAN_COLUMNS, values[-1]),
            descriptor(chunk.e if store else chunk.weight, 64, SCAN_COLUMNS // 2), chunk.sums[0], VOCABULARY, chunk.row,
            chunk.anchor, chunk.targets, chunk.anchor, chunk.has_target, *chunk.sums, 1.0, ROWS, VOCABULARY, width,
            BN=SCAN_COLUMNS, **ring(values), BIAS=False, SOFTCAP=False, STORE=store, num_warps=4,
        )  # fmt: skip

    columns = output_columns(width)
    box = 64 if columns == 192 else 128

    def dhidden(values: tuple[int, ...]) -> None:
        dhidden_product[grid](
            descriptor(chunk.e, 64, 64), *b_descriptors(chunk.weight, columns), chunk.row, chunk.source, chunk.dhidden,
            chunk.sums[0], chunk.plan, VOCABULARY, width, BN=columns, TAIL=columns % 128, **ring(values), num_warps=4,
        )  # fmt: skip

    def dweight(values: tuple[int, ...], adds: str) -> None:
        dweight_product[grid](
            descriptor(chunk.e, 64, 64), *b_descriptors(chunk.hidden, columns), chunk.dweight,
            descriptor(chunk.dweight, 64, box), chunk.plan, VOCABULARY, width, BN=columns, TAIL=columns % 128,
            **ring(values), ADDS=adds, num_warps=4,
        )  # fmt: skip

    yield "scan", "cuBLAS", lambda: torch.mm(chunk.hidden, chunk.weight.t(), out=chunk.e)
    for values in SCANS:
        yield "scan", f"E {values}", lambda values=values: scan(values, "bf16")
    for values in SCANS:
        yield "scan", f"no E {values}", lambda values=values: scan(values, "")
    yield "dhidden", "cuBLAS", lambda: torch.mm(chunk.dlogits, chunk.weight, out=chunk.dhidden)
    for values in DHIDDENS:
        yield "dhidden", str(values), lambda values=values: dhidden(values)
    yield "dweight", "cuBLAS", lambda: chunk.dweight.addmm_(chunk.dlogits.t(), chunk.hidden)
    for values in DWEIGHTS:
        yield "dweight", f"added {values}", lambda values=values: dweight(values, "here")
    yield "dweight", f"first {DWEIGHTS[0]}", lambda: dweight(DWEIGHTS[0], "")


def measure(width: int, rounds: int) -> None:
    """Print the medians of one width."""
    calls = list(variants(make_chunk(width)))
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in calls]
    for _ in range(rounds + 1):
        for (_, _, call), taken in zip(calls, events, strict=True):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            stop.record()
            taken.append((start, stop))
    torch.cuda.synchronize()
    base: list[float] = []
    for (kernel, variant, _), taken in zip(calls, events, strict=True):
        times = [start.elapsed_time(stop) for start, stop in taken[1:]]  # the first compiles
        base = times if variant == "cuBLAS" else base
        ratio = statistics.median(ours / theirs for ours, theirs in zip(times, base, strict=True))
        print(
            f"H={width:<5} {kernel:8} {variant:22} {statistics.median(times):8.3f} ms  × cuBLAS {ratio:.3f}", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[1024, 2048, 4096], help="H of the head")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name())
    for width in arguments.widths:
        measure(width, arguments.rounds)


if __name__ == "__main__":
    main()
