"""The recipes in configs/ are configurations that can run where their comments say."""

import importlib.util
from pathlib import Path

import pytest

from engine.config import cli
from engine.start import checks

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
RANKS = {
    "quickstart.yaml": (1, "cpu"),
    "quickstart-rows.yaml": (1, "cpu"),
    "sft-qwen2.5.yaml": (1, "cuda"),
    "dpo-qwen2.5.yaml": (1, "cuda"),
    "reward-model-qwen2.5.yaml": (1, "cuda"),
    "tldr-pythia410m.yaml": (2, "cuda"),
    "gsm8k.yaml": (1, "cuda"),
}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_recipe_fits_its_machine(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(CONFIGS)
    config, _ = cli.parse(["--config", str(path)])
    ranks, device = RANKS[path.name]
    checks.check(config, ranks, device)
    assert config.launch.ranks in (None, ranks)
    assert path.read_text().startswith("# ")


def test_gsm8k_reward() -> None:
    spec = importlib.util.spec_from_file_location("gsm8k_reward", CONFIGS / "gsm8k_reward.py")
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
