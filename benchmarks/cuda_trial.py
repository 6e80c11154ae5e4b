"""Build, check and time every variant of the CUDA C++ kernels: ``python -m benchmarks.cuda_trial --out FOLDER``.

A development tool, like ``benchmarks.rings``: it shows which tiles, stages and clusters belong in a table, and what the
main loop costs alone. Variants run in a process of their own, which is begun again without the variant that crashed or
hung it. Times are medians of neighbouring pairs with cuBLAS's product of the same shape, on two sets of inputs in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORKER = [sys.executable, "-m", "benchmarks.cuda_worker"]
Item = list[Any]
"""What to do, with which variant, H, V: see :mod:`benchmarks.cuda_worker`."""
SIZES = [(4096, 151936), (2048, 151936), (1024, 151936), (576, 49152)]
"""(H, V)."""
BANDS = (2, 4, 8, 32)
"""Other than the worker's own; in rows of a cluster's tiles."""
START_SECONDS, ITEM_SECONDS, NCU_SECONDS = 90.0, 25.0, 45.0
CHECK_SECONDS = 100.0
"""Of all checks together."""
GLUON = "gluon_scan"
COUNTERS = [
    "sm__inst_executed_pipe_tensor", "sm__pipe_tensor", "sm__cycles_elapsed.avg.per_second",
    "gpu__time_duration.sum", "smsp__average_warps_issue_stalled", "lts__t_sectors_op_read.sum", "lts__throughput",
    "sm__throughput", "dram__throughput", "sm__inst_executed.avg.per_cycle_active", "issue_active",
]  # fmt: skip


class Sensors:
    """The card's clock and power while others work, as nvidia-smi has them."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, float, float]] = []
        query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "50"]
        self.process: subprocess.Popen[str] | None = None
        if shutil.which("nvidia-smi"):
            self.process = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        for line in self.process.stdout:
            try:
                clock, power = (float(value) for value in line.split(","))
            except ValueError:
                continue
            self.samples.append((time.time(), clock, power))

    def between(self, began: float, ended: float) -> dict[str, float]:
        """Medians of the clock in MHz and the power in W, once the card has settled."""
        inside = [sample for sample in self.samples if began + 0.1 <= sample[0] <= ended]
        if not inside:
            return {}
        return {
            "mhz": statistics.median(sample[1] for sample in inside),
            "watts": statistics.median(sample[2] for sample in inside),
        }

    def end(self) -> None:
        """No more samples."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class Worker:
    """A process that does items, and a thread that reads what it says."""

    def __init__(self, folder: Path, items: list[Item], log: Path) -> None:
        self.said: queue.Queue[str] = queue.Queue()
        with log.open("a") as errors:
            self.process = subprocess.Popen(
                [*WORKER, str(folder), json.dumps(items)], stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT
            )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.said.put(line)
        self.said.put("")

    def result(self, seconds: float) -> dict[str, Any]:
        """The next line, or what became of it."""
        try:
            line = self.said.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return {"error": "hung, or out of time"}
        return json.loads(line) if line else {"error": "crashed"}

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()


def collect(folder: Path, items: list[Item], log: Path, deadline: float) -> list[dict[str, Any]]:
    """Results of the items in order; a variant that fails takes no part in the items after."""
    results: list[dict[str, Any]] = []
    failed: set[str] = set()
    worker: Worker | None = None
    for index, (_, name, *_) in enumerate(items):
        if name in failed or time.monotonic() > deadline:
            results.append({"error": "failed before" if name in failed else "no time left"})
            continue
        if worker is None:
            worker = Worker(folder, [item for item in items[index:] if item[1] not in failed], log)
            result = worker.result(min(START_SECONDS, deadline - time.monotonic()))
            if "error" in result:
                worker.end()
                raise SystemExit(f"a worker does not start ({result['error']}):\n{log.read_text()[-3000:]}")
        result = worker.result(min(ITEM_SECONDS, deadline - time.monotonic()))
        results.append(result)
        if "error" in result:
            failed.add(name)
            worker.end()
            worker = None
    if worker is not None:
        worker.end()
    return results


def profile(folder: Path, name: str, size: tuple[int, int], out: Path, deadline: float) -> None:
    """A few of ncu's counters of a variant and of cuBLAS's product beside it."""
    ncu = shutil.which("ncu") or next((str(path) for path in Path("/opt/nvidia").glob("nsight-compute/*/ncu")), None)
    if ncu is None:
        print("no ncu here")
        return
    items = json.dumps([["profile", name, *size]])
    command = [
        ncu, "--clock-control", "none", "--section", "SpeedOfLight", "--section", "ComputeWorkloadAnalysis",
        "--section", "WarpStateStats", "--page", "raw", "-k", "regex:product|nvjet|gemm|cutlass", "-c", "2",
        *WORKER, str(folder), items,
    ]  # fmt: skip
    log = out / f"ncu_{name}_H{size[0]}.txt"
    with log.open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, cwd=ROOT, start_new_session=True)
        try:
            process.wait(timeout=max(1.0, min(NCU_SECONDS, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # what ncu runs, too
            print(f"ncu on {name}: no answer in time")
            return
    print(f"ncu, {name}, H={size[0]}:")
    for line in log.read_text().splitlines():
        if "Context" in line or any(counter in line for counter in COUNTERS):
            print("  " + " ".join(line.split())[:160])


def table(names: list[str], results: dict[str, dict[str, Any]]) -> None:
    """Print the ratios to cuBLAS."""
    heads = [f"H={width}" for width, _ in SIZES]
    print(f"\n{'× cuBLAS (TFLOP/s)':46}" + "".join(f"{head:>16}" for head in heads))
    for name in names:
        cells = []
        for head in heads:
            result = results[name].get(head, {})
            shown = result.get("error", "")[:14]
            if "ratio" in result:
                shown = f"{result['ratio']:.3f} ({result['tflops']:.0f})"
            cells.append(f"{shown:>16}")
        print(f"{name:46}" + "".join(cells), flush=True)


def bursts(names: list[str], results: dict[str, dict[str, Any]], sensors: Sensors) -> None:
    """Print what kernels take one after the other of their kind, and at which clock and power."""
    heads = ("ms", "MHz", "W", "× cuBLAS", "its ms", "MHz", "W")
    print(f"\n{'H=4096, for 0.25 s alone':46}" + "".join(f"{head:>10}" for head in heads))
    for name in names:
        result = results[name].get("H=4096", {})
        if "burst" not in result:
            continue
        for key in ("burst", "bare_burst"):
            result[key] |= sensors.between(result[key]["began"], result[key]["ended"])
        ours, bare = result["burst"], result["bare_burst"]
        cells = [f"{ours['ms']:10.2f}", f"{ours.get('mhz', 0):10.0f}", f"{ours.get('watts', 0):10.0f}"]
        cells += [f"{ours['ms'] / bare['ms']:10.3f}", f"{bare['ms']:10.2f}"]
        cells += [f"{bare.get('mhz', 0):10.0f}", f"{bare.get('watts', 0):10.0f}"]
        print(f"{name:46}" + "".join(cells))


def best(names: list[str], kind: str, results: dict[str, dict[str, Any]], head: str, count: int) -> list[str]:
    """The fastest of a kind at one H."""
    starts = (kind + "_turns", kind + "_halves")
    done = [name for name in names if name.startswith(starts) and "ratio" in results[name].get(head, {})]
    return sorted(done, key=lambda name: results[name][head]["ratio"])[:count]


def summary(names: list[str], results: dict[str, dict[str, Any]]) -> None:
    """Print the main loop's floor, and what the best scan and gradient products take together."""
    print(f"\n{'':10}{'main loop':>10}{'scan':>10}{'dX':>10}{'dW':>10}{'the three':>11}  × cuBLAS")
    for width, _ in SIZES:
        head = f"H={width}"
        chosen = [best(names, kind, results, head, 1) for kind in ("mainloop", "scan", "dhidden", "dweight")]
        if not all(chosen):
            continue
        figures = [results[name[0]][head] for name in chosen]
        together = sum(figure["ms"] for figure in figures[1:]) / sum(figure["bare_ms"] for figure in figures[1:])
        print(f"{head:10}" + "".join(f"{figure['ratio']:10.3f}" for figure in figures) + f"{together:11.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs/cuda_trial", help="for the JSON file and ncu's output")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/cuda", help="where the module is built")
    parser.add_argument("--seconds", type=float, default=240.0, help="what is not done by then is left out")
    parser.add_argument("--only", default="", help="a regular expression of variants' names")
    parser.add_argument("--no-gluon", action="store_true", help="leave today's scan in Gluon out")
    arguments = parser.parse_args()
    began = time.monotonic()
    deadline = began + arguments.seconds
    arguments.out.mkdir(parents=True, exist_ok=True)
    log = arguments.out / "workers.log"
    builder = [sys.executable, str(ROOT / "csrc/cuda/build.py"), str(arguments.folder), "--only", arguments.only]
    built = subprocess.run(builder, capture_output=True, text=True)
    print(built.stdout + built.stderr, flush=True)
    if built.returncode != 0:
        raise SystemExit(1)
    figures = json.loads((arguments.folder / "build.json").read_text())
    # Clusters last: should all of them hang, the others are not the ones that there is no time for.
    names = sorted(
        (name for name, figure in figures.items() if "error" not in figure), key=lambda name: "share" in name
    )
    results: dict[str, dict[str, Any]] = {name: {"build": figures[name]} for name in figures}

    until = min(deadline, time.monotonic() + CHECK_SECONDS)
    checks = collect(arguments.folder, [["check", name, 0, 0] for name in names], log, until)
    for name, result in zip(names, checks, strict=True):
        results[name]["check"] = result
        verdict = "right" if result.get("right") else "WRONG" if "right" in result else result["error"]
        print(f"{name:46} {verdict}")
        for line in result.get("wrong", [])[:6]:
            print("    " + line)
    print(f"checked after {time.monotonic() - began:.0f} s", flush=True)

    timed = [name for name, result in zip(names, checks, strict=True) if "error" not in result]
    if not arguments.no_gluon:
        timed.append(GLUON)
        results[GLUON] = {}
    items: list[Item] = [["time", name, *size] for size in SIZES for name in timed]
    sensors = Sensors()
    for item, result in zip(items, collect(arguments.folder, items, log, deadline), strict=True):
        results[item[1]][f"H={item[2]}"] = result
    sensors.end()
    table(timed, results)
    bursts(timed, results, sensors)
    (arguments.out / "cuda_trial.json").write_text(json.dumps(results, indent=1))
    print(f"timed after {time.monotonic() - began:.0f} s", flush=True)

    items = [
        ["time", name, *size, band]
        for size in SIZES
        for kind in ("mainloop", "scan", "dhidden", "dweight")
        for name in best(timed, kind, results, f"H={size[0]}", 2)
        for band in BANDS
    ]
    for item, result in zip(items, collect(arguments.folder, items, log, deadline), strict=True):
        results[item[1]][f"H={item[2]} band={item[4]}"] = result
    (arguments.out / "cuda_trial.json").write_text(json.dumps(results, indent=1))
    for what in dict.fromkeys((item[1], item[2]) for item in items):
        tried = {
            item[4]: results[what[0]][f"H={what[1]} band={item[4]}"] for item in items if (item[1], item[2]) == what
        }
        cells = [f"{band}: {result['ratio']:.3f}" for band, result in tried.items() if "ratio" in result]
        print(f"H={what[1]:<6}{what[0]:46} bands " + ", ".join(cells))
    print(f"bands after {time.monotonic() - began:.0f} s", flush=True)

    for kind in ("mainloop", "scan"):
        for name in best(timed, kind, results, "H=4096", 1):
            profile(arguments.folder, name, SIZES[0], arguments.out, deadline)
    summary(timed, results)
    print(f"done after {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
