"""An algorithm of the user's own, taken out of docs/extending.md: trained, resumed, on two ranks, and refused."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import engine.run
from algorithms.base import Run
from algorithms.rollout import Rollout
from engine.config import ConfigError, cli
from tests import users
from tests.system.helpers import run_engine, run_here

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"
CODE = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL).group(1)  # type: ignore[union-attr]


@pytest.fixture
def raft(tmp_path: Path) -> Path:
    """The page's code in a file of the user's."""
    (tmp_path / "raft.py").write_text(CODE)
    return tmp_path / "raft.py"


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "runs/run/metrics.jsonl").read_text().splitlines()]


def test_the_page_needs_no_other_algorithm() -> None:
    imported = {node.module for node in ast.walk(ast.parse(CODE)) if isinstance(node, ast.ImportFrom)}
    ours = {name for name in imported if name and name.startswith(("algorithms", "engine", "kernels"))}
    assert ours == {"algorithms.base", "algorithms.rollout"} and len(CODE.splitlines()) < 40


def test_the_best_of_all_ranks_are_chosen(raft: Path) -> None:
    """A quarter of twelve, of equals the first; split over ranks, one of them empty, the same ones."""
    kind = cli.parse(["--algo", f"{raft}:RAFT"])[0]
    scores = torch.tensor([1.0, 5.0, 3.0, 0.0, 3.0, 3.0, -1.0, 2.0, 1.0, 0.0, 4.0, 2.0])

    def chosen(share: float, first: int, last: int) -> list[int]:
        part = scores[first:last]
        ones, groups = torch.arange(len(part) + 1), torch.zeros(len(part), dtype=torch.int64)
        rollout = Rollout(part, groups, groups.bool(), ones, None)
        run = Run(0, 0.0, "k1", 8, reduce=lambda x: x, gather=lambda _: (scores, slice(first, last)))
        objective = kind.algorithm.objective(rollout, kind.algorithm.Settings(share=share), run)  # type: ignore[misc]
        assert objective.units.shape[1] == 1 and objective.units.dtype == torch.int64
        return [first + i for i in objective.units[:, 0].tolist()]

    for share, expected in ((0.25, [1, 2, 10]), (0.1, [1]), (0.34, [1, 2, 4, 10]), (1.0, list(range(12)))):
        assert chosen(share, 0, 12) == expected
        assert chosen(share, 0, 5) + chosen(share, 5, 5) + chosen(share, 5, 12) == expected


def test_it_trains_and_resumes_without_its_file(raft: Path, tmp_path: Path, without_pictures: None) -> None:
    model = users.model_folder(tmp_path / "model")
    options = ["--algo", f"{raft}:RAFT", "--raft.share", "0.3", "--train.learning_rate", "0.01"]
    assert engine.run.main(users.arguments(tmp_path, model, *options)) == 0
    run_dir = tmp_path / "runs" / "run"
    assert all(row["raft/least_score"] >= row["reward/mean"] and "kl/coef" not in row for row in rows(tmp_path))
    before, after = load_file(model / "model.safetensors"), load_file(run_dir / "model" / "model.safetensors")
    assert not all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((run_dir / "summary.json").read_text())["algo"] == "raft"
    assert (run_dir / "algorithm.py").read_text() == CODE
    settings = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert settings["algo"] == f"{run_dir / 'algorithm.py'}:RAFT" and settings["raft"] == {"share": 0.3}

    assert engine.run.main(users.arguments(tmp_path, model, *options, "--train.steps", "3", "--name", "whole")) == 0
    raft.unlink()
    moved = run_dir.rename(tmp_path / "runs" / "moved")
    assert engine.run.main(["--resume", str(moved), "--train.steps", "3"]) == 0
    assert json.loads((moved / "summary.json").read_text())["steps"] == 3
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (moved, moved.with_name("whole"))]
    assert weights[0] == weights[1], "as a run that was never stopped"
    assert yaml.safe_load((moved / "config.yaml").read_text())["algo"] == f"{moved / 'algorithm.py'}:RAFT"
    (moved / "algorithm.py").unlink()
    assert engine.run.main(["--resume", str(moved), "--train.steps", "4"]) == 2


def test_help_shows_its_settings(raft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parse(["--help", "--algo", f"{raft}:RAFT"])
    assert re.search(r"raft:\n  RAFT's choice.*--raft.share FLOAT +Share of the batch", capsys.readouterr().out, re.S)
    (tmp_path / "run.yaml").write_text(f"algo: {raft}:RAFT\nraft: {{share: 0.125}}\n")
    assert engine.run.main(["--config", str(tmp_path / "run.yaml"), "--print-config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["raft"] == {"share": 0.125}


def test_an_importable_module_serves_as_well(
    raft: Path, tmp_path: Path, without_pictures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a class that derives from one that is built in keeps the other's settings."""
    (tmp_path / "of_a_user").mkdir()
    (tmp_path / "of_a_user" / "mine.py").write_text(
        "from algorithms.grpo import GRPO\n\nclass Mine(GRPO):\n    name = 'mine'\n    least_group = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = users.model_folder(tmp_path / "model")
    options = ["--algo", "of_a_user.mine:Mine", "--grpo.mean", "constant", "--train.steps", "1"]
    assert engine.run.main(users.arguments(tmp_path, model, *options)) == 0
    assert not (tmp_path / "runs" / "run" / "algorithm.py").exists()
    assert "grpo/zero_advantage_fraction" in rows(tmp_path)[0]


RECORD = "from pydantic import Field\nfrom algorithms.base import Algorithm, Section\nfrom algorithms.ppo import PPO\n"
OBJECTIVE = "    def objective(self, rollout, settings, run): ...\n"
FAULTY = {
    "no file": (None, "nowhere.py:RAFT", "algo: there is no 'nowhere.py'"),
    "no module": (None, "nowhere.at_all:RAFT", "there is no module 'nowhere.at_all' to import"),
    "no class named": (None, "nowhere.py:", "must read 'module:Class' or 'file.py:Class'"),
    "no class": (CODE, "own.py:Raft", "own.py has no 'Raft'; did you mean 'RAFT'?"),
    "no algorithm": (CODE + "\n\ndef other(): ...\n", "own.py:other", "is no subclass of algorithms.base.Algorithm"),
    "the base itself": (CODE, "own.py:Algorithm", "is no subclass of algorithms.base.Algorithm; it has RAFT"),
    "fails": (CODE + "\n\n1 / 0\n", "own.py:RAFT", "own.py, line 33: ZeroDivisionError: division by zero"),
    "no Python": ("class RAFT(:\n", "own.py:RAFT", "own.py, line 1: SyntaxError"),
    "no objective": (f"{RECORD}class A(Algorithm):\n    name = 'a'\n", "own.py:A", "it has no objective"),
    "no name": (f"{RECORD}class A(Algorithm):\n{OBJECTIVE}", "own.py:A", "its name is None"),
    "name that is taken": (f"{RECORD}class A(PPO):\n    least_group = 2\n", "own.py:A", "its name 'ppo' is that of"),
    "section that is taken": (
        f"{RECORD}class A(Algorithm):\n    name = 'a'\n    section = 'kl'\n    Settings = Section\n{OBJECTIVE}",
        "own.py:A",
        "its section 'kl' is taken",
    ),
    "no settings": (
        f"{RECORD}class A(Algorithm):\n    name = 'a'\n    class Settings: ...\n{OBJECTIVE}",
        "own.py:A",
        "its Settings must be a subclass of algorithms.base.Section",
    ),
    "setting without a default": (
        f"{RECORD}class A(Algorithm):\n    name = 'a'\n    class Settings(Section):\n        b: int\n{OBJECTIVE}",
        "own.py:A",
        "its settings need defaults that are right: b: Field required",
    ),
    "value model without settings": (
        f"{RECORD}class A(Algorithm):\n    name = 'a'\n    value_model = True\n{OBJECTIVE}",
        "own.py:A",
        "Settings that extend ValueModelSettings",
    ),
    "attribute": (f"{RECORD}class A(Algorithm):\n    name = 'a'\n    kl = 'los'\n{OBJECTIVE}", "own.py:A", "its kl is"),
    "rows of a data set with a policy ratio": (
        f"{RECORD}class A(Algorithm):\n    name = 'a'\n    batches = 'rows'\n    policy_ratio = True\n{OBJECTIVE}",
        "own.py:A",
        "its batches are rows of a data set, which go with no value_model, kl or policy_ratio",
    ),
    "a reward model of samples": (
        f"{RECORD}class A(Algorithm):\n    name = 'a'\n    head = 'score'\n    rows = 'pair'\n{OBJECTIVE}",
        "own.py:A",
        "its head is a score, which is trained on pairs of a data set's rows",
    ),
}


@pytest.mark.parametrize("text,algo,needle", FAULTY.values(), ids=FAULTY.keys())
def test_faults_are_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str | None,
    algo: str,
    needle: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "own.py").write_text(text)
    assert engine.run.main(["--algo", algo, "--output_dir", "runs"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and said.err.count("\n") == 1 and needle in said.err, said.err
    assert said.out == "" and not (tmp_path / "runs").exists()


def test_its_settings_are_checked(raft: Path) -> None:
    for option, value, needle in (
        ("share", "0", "raft.share = '0': input should be greater than 0"),
        ("shares", "1", "unknown key 'raft.shares'; did you mean raft.share?"),
    ):
        with pytest.raises(ConfigError, match=re.escape(needle)):
            cli.parse(["--algo", f"{raft}:RAFT", f"--raft.{option}", value])
    with pytest.raises(ConfigError, match=r"unknown key 'raft\.share'"):
        cli.parse(["--algo", "ppo", "--raft.share", "1"])


@pytest.mark.slow
def test_on_two_ranks_it_chooses_as_on_one(raft: Path, tmp_path: Path) -> None:
    """The same responses of the same batch, whichever rank has them; and the run resumes on two ranks."""
    model = users.model_folder(tmp_path / "model")
    options = ["--algo", f"{raft}:RAFT", "--raft.share", "0.3", "--train.learning_rate", "0.01"]
    weights = []
    for ranks in (1, 2):
        folder = tmp_path / f"on-{ranks}"
        folder.mkdir()
        arguments = shlex.join(users.arguments(folder, model, *options, "--launch.ranks", str(ranks)))
        run_here(arguments) if ranks == 1 else run_engine(arguments)
        weights.append(load_file(folder / "runs/run/model/model.safetensors"))
    alone, both = rows(tmp_path / "on-1"), rows(tmp_path / "on-2")
    assert [row["raft/least_score"] for row in alone] == [row["raft/least_score"] for row in both]
    assert [row["policy/loss"] for row in alone] == pytest.approx([row["policy/loss"] for row in both], rel=1e-4)
    for name, expected in weights[0].items():
        torch.testing.assert_close(weights[1][name], expected, rtol=0, atol=2e-3)
    raft.unlink()
    run_engine(f"--resume {tmp_path / 'on-2/runs/run'} --train.steps 3")
    assert len(rows(tmp_path / "on-2")) == 3
