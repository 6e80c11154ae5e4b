"""The recipes in configs/, and the commands of docs/recipes.md, are settings that can run where their comments say."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from engine.config import cli
from engine.evaluation import checks as command_checks
from engine.evaluation import settings
from engine.start import checks

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
COMMANDS = {"relabel": settings.Relabel, "evaluate": settings.Evaluate}
"""Those that take a recipe, other than ``run``; their recipes have their names."""
RECIPES = sorted(str(path.relative_to(ROOT)) for path in CONFIGS.rglob("*.yaml"))
OF_RUNS = [path for path in RECIPES if Path(path).stem not in COMMANDS]
OF_COMMANDS = [path for path in RECIPES if Path(path).stem in COMMANDS]
SAMPLING = [path for path in OF_RUNS if Path(path).stem in ("ppo", "rloo", "grpo", "online_dpo", "bok")]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder as commands find it, with the files that earlier stages have written."""
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(CONFIGS)
    for name in ("tldr-train.parquet", "tldr-validation.parquet"):
        Path(name).write_text("PAR1")


def check_run(words: list[str]) -> None:
    """Takes a run's options through all that settings alone can show, on the ranks that they name or the fewest."""
    config, _ = cli.parse(words)
    on_cpu = config.data.task is not None
    checks.check(config, config.launch.ranks or 1 + config.generating_ranks, "cpu" if on_cpu else "cuda")


def check_command(name: str, words: list[str]) -> None:
    """The same for a command that comes after runs, over no run's settings."""
    given = settings.read(COMMANDS[name], cli.read_options(words), {}, usage="", description="")
    if isinstance(given, settings.Evaluate):
        command_checks.check_judge(given)
    assert given.data.path and given.reward.sources


@pytest.mark.parametrize("path", OF_RUNS)
def test_a_run_fits_its_machine(path: str) -> None:
    check_run(["--config", path])
    assert (ROOT / path).read_text().startswith("# ")


@pytest.mark.parametrize("path", OF_COMMANDS)
def test_a_command_takes_its_file(path: str) -> None:
    check_command(Path(path).stem, ["--config", path])
    assert (ROOT / path).read_text().startswith("# ")


@pytest.mark.parametrize("path", SAMPLING)
def test_a_run_that_samples_can_be_split(path: str) -> None:
    """By the options that its comment names."""
    options = re.search(r"(--schedule\.placement split.*)", (ROOT / path).read_text())
    assert options, "its comment does not say how"
    check_run(["--config", path, *options[1].split()])


def documented() -> list[str]:
    """The commands of docs/recipes.md, each in one line."""
    text = (ROOT / "docs" / "recipes.md").read_text().replace("\\\n", " ")
    return [line.partition(" #")[0] for line in text.splitlines() if line.startswith("python -m engine.")]


@pytest.mark.parametrize("line", documented())
def test_a_documented_command_can_be_given(line: str) -> None:
    _, _, module, *words = shlex.split(line)
    name = module.removeprefix("engine.")
    if name == "run":
        check_run(words)
    elif name in COMMANDS:
        check_command(name, words)
    else:
        pytest.fail(f"no test knows engine.{name}")


def test_every_recipe_is_documented() -> None:
    commands = " ".join(documented())
    assert [path for path in RECIPES if "quickstart" not in path and path not in commands] == []


def test_gsm8k_reward() -> None:
    spec = importlib.util.spec_from_file_location("gsm8k_reward", CONFIGS / "gsm8k" / "reward.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    completions = ["She has 3 + 4 = 7.", "the answer is 1,000.0", "no idea", "-5", "7 apples, then 8", "no idea"]
    answers = ["4+3\n#### 7", "#### 1000", "#### 2", "#### -5", "#### 7", "none"]
    assert module.last_number(completions=completions, answer=answers, question=[""] * 6) == [
        1.0,
        1.0,
        0.0,
        1.0,
        0.0,
        0.0,
    ]
