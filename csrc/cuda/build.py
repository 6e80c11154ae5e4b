"""Compile the kernels for Hopper with nvcc: ``python csrc/cuda/build.py FOLDER`` leaves the module ``_cuda`` there.

Needs nvcc (on the PATH, in $CUDA_HOME/bin or /usr/local/cuda/bin) and pybind11, its own or torch's. Every variant is a
file of its own, so that they compile side by side; one that does not compile is left out and named.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
SHARED_BYTES = 232448
"""Shared memory of a block."""
STAGING_BYTES = 32768
TARGET = ["-gencode=arch=compute_90a,code=sm_90a"]


class Kind(NamedTuple):
    """A kernel's epilogue, and how its operands lie."""

    epilogue: str
    a: str
    b: str


KINDS = {
    "mainloop": Kind("TileSums<S>", "K", "K"),
    "scan": Kind("Scan<S, true, true>", "K", "K"),
    "forward": Kind("Scan<S, false, true>", "K", "K"),
    "dhidden": Kind("Rounded<S, true>", "K", "MN"),
    "dweight": Kind("Rounded<S, false>", "MN", "MN"),
    "dweight_fp32": Kind("Sums<S, false>", "MN", "MN"),
    "dweight_add": Kind("Sums<S, true>", "MN", "MN"),
}
# Rows and columns of a warpgroup's tile, who takes turns ("turns") or shares ("halves"), what a cluster has in common.
SHAPES = {
    "mainloop": [
        (128, 192, "turns", "Nothing"), (128, 192, "turns", "B"), (128, 192, "turns", "A"),
        (128, 128, "turns", "Nothing"), (128, 128, "turns", "B"), (64, 256, "turns", "B"),
        (64, 256, "halves", "Nothing"), (64, 256, "halves", "B"), (128, 128, "halves", "A"),
        (128, 192, "halves", "Nothing"), (128, 192, "halves", "B"),
    ],
    "scan": [
        (128, 192, "turns", "Nothing"), (128, 192, "turns", "B"), (128, 192, "turns", "A"),
        (128, 128, "turns", "Nothing"), (128, 128, "turns", "B"), (64, 256, "turns", "B"),
        (64, 256, "halves", "Nothing"), (64, 256, "halves", "B"), (128, 128, "halves", "A"),
    ],
    "forward": [(128, 192, "turns", "B"), (128, 128, "turns", "B"), (64, 256, "halves", "B")],
    "dhidden": [
        (64, 256, "halves", "Nothing"), (64, 256, "halves", "B"), (128, 128, "halves", "Nothing"),
        (128, 192, "turns", "B"), (128, 128, "turns", "B"),
    ],
    "dweight": [
        (64, 256, "halves", "Nothing"), (64, 256, "halves", "B"), (128, 128, "halves", "Nothing"),
        (128, 192, "turns", "B"), (128, 128, "turns", "B"),
    ],
    "dweight_fp32": [(64, 256, "halves", "B")],
    "dweight_add": [(64, 256, "halves", "B"), (128, 192, "turns", "B"), (128, 128, "turns", "B")],
}  # fmt: skip


class Variant(NamedTuple):
    """One entry of the table."""

    name: str
    kind: str
    source: str


def stages(rows: int, columns: int, kind: str) -> int:
    """How many stages the shared memory holds beside 1 KiB for alignment and what the epilogue needs."""
    room = SHARED_BYTES - 1024 - (0 if kind in ("mainloop", "forward") else STAGING_BYTES)
    return room // (2 * 64 * (rows + columns) + 16)


def variants() -> list[Variant]:
    """All that is built."""
    result = []
    for kind, shapes in SHAPES.items():
        epilogue, a, b = KINDS[kind]
        for group_rows, columns, work, common in shapes:
            rows = group_rows * (1 if work == "turns" else 2)
            count = stages(rows, columns, kind)
            name = f"{kind}_{work}_{rows}x{columns}_s{count}" + ("" if common == "Nothing" else f"_share{common}")
            shape = (
                f"{group_rows}, {columns}, {count}, {str(work == 'turns').lower()}, Common::{common}, "
                f"Major::{a}, Major::{b}"
            )
            source = (
                f'#define TANDEM_NAME "{name}"\n#define TANDEM_SHAPE {shape}\n#define TANDEM_EPILOGUE {epilogue}\n'
                '#include "variant.cuh"\n'
            )
            result.append(Variant(name, kind, source))
    return result


def find_nvcc() -> str:
    """The compiler's path; an error where there is none."""
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    found = shutil.which("nvcc") or next(
        (str(Path(home, "bin/nvcc")) for home in homes if home and Path(home, "bin/nvcc").exists()), None
    )
    if found is None:
        raise SystemExit("no nvcc on the PATH, in $CUDA_HOME/bin or /usr/local/cuda/bin")
    return found


def pybind11_include() -> str:
    """Where pybind11's headers are: its own package, or the copy in torch."""
    for package in ("pybind11", "torch"):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            folder = Path(spec.submodule_search_locations[0], "include")
            if (folder / "pybind11/pybind11.h").exists():
                return str(folder)
    raise SystemExit("no pybind11 headers, neither pybind11's own nor torch's")


def figures(log: str) -> dict[str, object]:
    """What ptxas says of a kernel: registers, bytes spilled, warnings that cost time."""
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.search(r"Used (\d+) registers", log)
    return {
        "registers": int(registers[1]) if registers else None,
        "spill_bytes": int(spills[1]) + int(spills[2]) if spills else None,
        "warnings": sorted(set(re.findall(r"\(C75\d\d\)[^'\n]*", log)) | set(re.findall(r".*setmaxnreg.*", log))),
    }


def run(command: list[str], log: Path) -> tuple[bool, str]:
    """Whether it succeeded, and what it said, which ``log`` keeps."""
    done = subprocess.run(command, capture_output=True, text=True)
    said = done.stdout + done.stderr
    log.write_text(" ".join(command) + "\n" + said)
    return done.returncode == 0, said


def build(folder: Path, only: str, jobs: int) -> dict[str, dict[str, object]]:
    """Compile and link into ``folder``. Gives :func:`figures` of each variant, or its compiler's errors."""
    folder.mkdir(parents=True, exist_ok=True)
    nvcc = find_nvcc()
    flags = ["-std=c++17", "-O3", f"-I{HERE}", "-Xcompiler", "-fPIC"]
    binding = folder / "binding.o"
    python = ["-I" + sysconfig.get_paths()["include"], "-I" + pybind11_include()]
    jobs_by_name = {
        variant.name: [*TARGET, "-Xptxas", "-v", "-c", str(folder / f"{variant.name}.cu")]
        for variant in variants()
        if re.search(only, variant.name)
    }
    for variant in variants():
        if variant.name in jobs_by_name:
            (folder / f"{variant.name}.cu").write_text(variant.source)
    results: dict[str, dict[str, object]] = {}
    with ThreadPoolExecutor(jobs) as pool:
        bound = pool.submit(
            run, [nvcc, *flags, *python, "-c", str(HERE / "binding.cpp"), "-o", str(binding)], folder / "binding.log"
        )
        compiled = {
            name: pool.submit(run, [nvcc, *flags, *job, "-o", str(folder / f"{name}.o")], folder / f"{name}.log")
            for name, job in jobs_by_name.items()
        }
        for name, future in compiled.items():
            succeeded, said = future.result()
            results[name] = figures(said) if succeeded else {"error": said[-2000:]}
        succeeded, said = bound.result()
    if not succeeded:
        raise SystemExit("the binding does not compile:\n" + said[-4000:])
    libraries = f"-L{Path(nvcc).resolve().parent.parent / 'lib'}"  # where a wheel of nvcc has them
    objects = [str(folder / f"{name}.o") for name, result in results.items() if "error" not in result]
    succeeded, said = run(
        [nvcc, *TARGET, "-shared", libraries, str(binding), *objects, "-o", str(folder / "_cuda.so")],
        folder / "link.log",
    )
    if not succeeded:
        raise SystemExit("the module does not link:\n" + said[-4000:])
    (folder / "build.json").write_text(json.dumps(results, indent=1))
    return results


def main() -> None:
    """Build, and print what ptxas says of each variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="a regular expression of variants' names")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    began = time.monotonic()
    results = build(arguments.folder, arguments.only, arguments.jobs)
    for name, result in results.items():
        print(f"{name:44}", result.get("error") or result)
    print(f"{len(results)} variants in {time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
