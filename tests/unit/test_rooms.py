"""The house: rooms on floors whose arrows go down only, files of a size to read, and pages whose paths exist.

``python -m tests.unit.test_rooms`` prints the drawing that docs/architecture.md holds.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "engine"
ROOMS = sorted(folder.parent.name for folder in ENGINE.glob("*/__init__.py"))
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "README.md"])
PARTS = ("algorithms", "benchmarks", "engine", "kernels", "tests")
"""Our packages."""
FOLDERS = (*PARTS, "configs", "csrc", "docs", "requirements", "scripts")

MOST_FLOORS = 10
MOST_FILES_AT_THE_TOP = 12
COMMANDS = ("evaluate", "export", "generate", "relabel")
"""Those of the pipeline, which have their places at the top of ``engine``."""
MOST_LINES = 350


@cache
def imports(file: Path) -> list[tuple[str, int]]:
    """Dotted names of ``engine`` that a file imports and the lines, also inside functions and for type checkers."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, f"{file}:{node.lineno}: imports name the whole path"
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return [(name, line) for name, line in found if name.startswith("engine.")]


def first_level(file: Path) -> str:
    """The room or file below ``engine`` that a file is in."""
    return file.relative_to(ENGINE).parts[0].removesuffix(".py")


def arrows() -> dict[str, set[str]]:
    """For each first-level name of ``engine`` those that it imports."""
    targets: dict[str, set[str]] = {}
    for file in ENGINE.rglob("*.py"):
        name = first_level(file)
        if name != "__init__":
            targets.setdefault(name, set()).update(module.split(".")[1] for module, _ in imports(file))
    return {name: found - {name} for name, found in sorted(targets.items())}


def floors(down: dict[str, set[str]]) -> dict[str, int]:
    """How high each name stands: one above the highest that it imports, from 1 for those that import none."""
    heights: dict[str, int] = {}

    def height(name: str, above: tuple[str, ...] = ()) -> int:
        assert name not in above, f"a cycle of imports: {' -> '.join([*above[above.index(name) :], name])}"
        if name not in heights:
            heights[name] = 1 + max((height(below, (*above, name)) for below in sorted(down[name])), default=0)
        return heights[name]

    for name in down:
        height(name)
    return heights


def drawing() -> str:
    """The floors from the top down, and what each room and file stands on."""
    down = arrows()
    heights = floors(down)
    order = sorted(heights, key=lambda name: (-heights[name], name))
    width = max(map(len, order))
    return "\n".join(
        f"{heights[name]:2}  {name:{width}}  {'-> ' + ' '.join(sorted(down[name])) if down[name] else ''}".rstrip()
        for name in order
    )


def test_arrows_between_rooms_go_down_only() -> None:
    heights = floors(arrows())
    assert max(heights.values()) <= MOST_FLOORS, f"one floor too many:\n{drawing()}"


def test_the_page_draws_the_house_as_it_is() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert f"```text\n{drawing()}\n```" in page, f"docs/architecture.md must hold this drawing:\n{drawing()}"


def test_the_top_has_room_for_the_commands_to_come() -> None:
    others = {file.stem for file in ENGINE.glob("*.py")} - set(COMMANDS)
    assert len(others) + len(COMMANDS) <= MOST_FILES_AT_THE_TOP, sorted(others)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_what_lives_there_and_what_others_may_import(room: str) -> None:
    """In two sentences; the modules that others do import are named in them, or all are said to be for everybody."""
    tree = ast.parse((ENGINE / room / "__init__.py").read_text(encoding="utf-8"))
    says = " ".join((ast.get_docstring(tree) or "").split())
    assert len(re.findall(r"[.!?](?= |$)", says)) == 2, f"two sentences, not {says!r}"
    modules = {file.stem for file in (ENGINE / room).glob("*.py")} - {"__init__", "__main__"}
    named = {name.split(".")[0] for name in re.findall(r"``([\w.]+)``", says)}
    if "for everybody" in says and not named & modules:
        return
    used: dict[str, str] = {}
    for top in ("engine", "benchmarks"):
        for file in sorted((ROOT / top).rglob("*.py")):
            if (ENGINE / room) in file.parents:
                continue
            for name, line in imports(file):
                parts = name.split(".")
                if parts[1] == room and len(parts) > 2 and parts[2] in modules:
                    used.setdefault(parts[2], f"{file.relative_to(ROOT)}:{line}")
    unsaid = {module: place for module, place in used.items() if module not in named}
    assert not unsaid, f"engine/{room}/__init__.py names no {unsaid}"


@pytest.mark.parametrize("package", ["algorithms", "engine", "kernels"])
def test_no_file_is_too_long_to_read(package: str) -> None:
    lines = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in (ROOT / package).rglob("*.py")}
    assert not {str(file.relative_to(ROOT)): count for file, count in lines.items() if count > MOST_LINES}


def defined(tree: ast.AST) -> dict[str, ast.AST]:
    """What the body of a module or class defines or imports, by name."""
    names: dict[str, ast.AST] = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names[node.name] = node
        elif isinstance(node, ast.Assign):
            names |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name: node for alias in node.names}
    if "__all__" in names:  # also what is imported on first use
        constants = [node for node in ast.walk(names["__all__"]) if isinstance(node, ast.Constant)]
        names = {str(node.value): node for node in constants} | names
    return names


def exists(dotted: str) -> bool:
    """Whether a dotted name of ours is a package, a module, or something that one of them defines."""
    parts = dotted.split(".")
    if dotted == "kernels._cpu":  # compiled by setup.py
        return True
    for count in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:count])
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if file.is_file():
            tree: ast.AST = ast.parse(file.read_text(encoding="utf-8"))
            for name in parts[count:]:
                if name not in (names := defined(tree)):
                    return False
                tree = names[name]
            return True
    return False


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_that_a_page_mentions_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in headings(target)):
                missing.append(link)
    for path in re.findall(rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})/[\w./-]*\w/?)", text):
        if not (ROOT / path).exists():
            missing.append(path)
    for module in re.findall(r"python -m ([\w.]+)", text):
        if module.split(".")[0] in PARTS and not exists(module):
            missing.append(module)
    for dotted in re.findall(rf"(?<![\w./-])((?:{'|'.join(PARTS)})(?:\.\w+)+)", text):
        if not exists(dotted) and not (page.parent / dotted).exists():  # a page's neighbour may be called engine.md
            missing.append(dotted)
    assert not missing


if __name__ == "__main__":
    print(drawing())
