"""The pages for those who come from TRL and OpenRLHF: every key is there, and leads to keys that exist."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from engine.config import Config, cli
from engine.start import checks

DOCS = Path(__file__).resolve().parents[2] / "docs"
TRL = (DOCS / "from-trl.md").read_text(encoding="utf-8")
OPENRLHF = (DOCS / "from-openrlhf.md").read_text(encoding="utf-8")
OURS = dict(cli.flat(Config()))
CONFIGS = ("GRPOConfig", "RLOOConfig", "DPOConfig", "SFTConfig", "RewardConfig")
needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="TRL is not installed: pip install -r requirements/test.txt"
)


def tables(page: str) -> dict[str, list[list[str]]]:
    """The rows of a page's tables, as cells, by the heading above them."""
    found = {}
    for section in page.split("\n## ")[1:]:
        lines = [line for line in section.splitlines() if line.startswith("| ")]
        found[section.splitlines()[0]] = [line.strip("| ").split(" | ") for line in lines[1:]]
    return {heading: rows for heading, rows in found.items() if rows}


def keys(rows: list[list[str]]) -> list[str]:
    """What the first cells call keys."""
    return [key for row in rows for key in re.findall(r"`([^`]+)`", row[0])]


def fields(package: str, file: str, name: str) -> dict[str, object]:
    """The fields that a data class declares itself, with their defaults as far as these are literals.

    Read from its source: an import of TRL takes ten seconds.
    """
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / file).read_text(encoding="utf-8"))
    body = next(one.body for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name)
    found: dict[str, object] = {}
    for one in body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            values = {word.arg: word.value for word in one.value.keywords} if isinstance(one.value, ast.Call) else {}
            default = values.get("default", one.value)
            found[one.target.id] = ast.literal_eval(default) if isinstance(default, ast.Constant) else None
    return {key: value for key, value in found.items() if not key.startswith("_")}


def of_config(name: str) -> dict[str, object]:
    """All fields of one of TRL's configurations."""
    own = fields("trl", f"trainer/{name.removesuffix('Config').lower()}_config.py", name)
    return of_training_arguments() | fields("trl", "trainer/base_config.py", "_BaseConfig") | own


def of_training_arguments() -> dict[str, object]:
    """Those that every one of them has from transformers."""
    return fields("transformers", "training_args.py", "TrainingArguments")


@needs_trl
def test_every_key_of_trl_has_its_row() -> None:
    found, everyday = tables(TRL), set(of_training_arguments())
    for heading in ("GRPOConfig and RLOOConfig", "DPOConfig", "SFTConfig", "RewardConfig"):
        theirs = set().union(*(of_config(name) for name in heading.split(" and "))) - everyday
        listed = keys(found[heading])
        assert listed == sorted(theirs), (heading, theirs ^ set(listed))
    assert set(keys(found["Keys of every day"])) <= everyday


@needs_trl
def test_defaults_are_said_as_they_are() -> None:
    rows = tables(TRL)["Defaults that differ"]
    for theirs, there, here, value in rows:
        config = next((name for name in CONFIGS if name in theirs), "GRPOConfig")
        assert str(of_config(config)[keys([[theirs]])[0]]).lower() == there, theirs
        ours = OURS[here.strip("`")]
        text = ", ".join(map(str, ours)) if isinstance(ours, tuple) else str(ours).lower()
        assert text == value, here


@pytest.mark.parametrize("page", [TRL, OPENRLHF], ids=["trl", "openrlhf"])
def test_every_row_leads_somewhere(page: str) -> None:
    """To a key of Tandem's, or it says why there is none; and whatever looks like a key of Tandem's is one."""
    sections = {key.split(".")[0] for key in OURS if "." in key}
    for heading, rows in tables(page).items():
        for row in rows:
            named = re.findall(r"`([^`]+)`", " ".join(row[1:]))
            assert row[1].startswith("none: ") or any(key in OURS for key in named), (heading, row)
            for key in named:
                assert key in OURS or key.split(".")[0] not in sections or " " in key, (heading, key)
    for target in re.findall(r"\]\(([^)#]+)", page):
        assert target.startswith("https://") or (DOCS / target).exists(), target


@pytest.mark.parametrize("page", [TRL, OPENRLHF], ids=["trl", "openrlhf"])
def test_the_command_after_can_run_on_eight_gpus(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text("def score(prompts, completions, completion_ids, **columns):\n    return []\n")
    blocks = re.findall(r"^```\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    command = next(block for block in blocks if "python -m engine.run" in block).replace("\\\n", " ")
    ours = next(line for line in command.splitlines() if line.startswith("python -m engine.run"))
    config, _ = cli.parse(shlex.split(ours)[3:])
    checks.check(config, 8, "cuda")


@needs_trl
def test_the_command_before_is_one_of_trl_s() -> None:
    theirs = TRL.split("```\n")[1].split("# with Tandem")[0]
    script = {"model_name_or_path", "dataset_name", "reward_funcs", "config_file", "num_processes"}
    assert set(re.findall(r"--(\w+)", theirs)) - script <= set(of_config("GRPOConfig"))
