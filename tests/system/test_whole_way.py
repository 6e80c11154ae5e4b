"""The commands of docs/pipeline.md's whole way, taken from the page, with a tiny model and a few preferences."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests import users
from tests.system.helpers import ROOT, importing, unranked

PAGE = (ROOT / "docs" / "pipeline.md").read_text(encoding="utf-8")
WAY = re.search(r"## The whole way\n.*?```\n(.*?)```", PAGE, re.DOTALL).group(1)  # type: ignore[union-attr]
LINES = WAY.replace("\\\n", " ").splitlines()
COMMANDS = [shlex.split(line, comments=True) for line in LINES if line.startswith("python")]
SMALL = {
    "engine.run": "--launch.device cpu",
    "engine.generate": "--rollout.max_response_tokens 8 --launch.device cpu",
    "engine.evaluate": "--launch.device cpu",
}
SAMPLED = "--rollout.prompts_per_step 4 --rollout.samples_per_prompt 4 --rollout.max_prompt_tokens 16"
SAMPLED += " --rollout.max_response_tokens 8 --train.steps 5 --save.hf_every_steps 2"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_way(tmp_path: Path) -> None:
    model = users.model_folder(tmp_path / "base")
    words = users.WORDS
    rows = [
        {"prompt": f"{a} {b}", "chosen": f"{a} {b} {a}", "rejected": f"{b} {words[(i + j) % 8]}"}
        for i, a in enumerate(words)
        for j, b in enumerate(words)
    ]
    users.write_rows(tmp_path / "preferences.jsonl", rows)
    assert [command[2] for command in COMMANDS] == [
        *("engine.run", "engine.run", "engine.generate", "engine.relabel", "engine.run", "engine.run"),
        *("engine.evaluate", "engine.export"),
    ]
    environment = unranked() | {"OMP_NUM_THREADS": "1", "PYTHONPATH": importing(ROOT)}
    for command in COMMANDS:
        given = [str(model) if part == "EleutherAI/pythia-410m" else part for part in command[1:]]
        given += shlex.split(SMALL.get(command[2], ""))
        if command[2] == "engine.run":
            given += shlex.split(SAMPLED if "online_dpo" in command else "--train.rows_per_step 8")
        done = subprocess.run(
            [sys.executable, *given], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{shlex.join(given)}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
    judged = json.loads((tmp_path / "runs/policy/evaluation/evaluation.json").read_text())["models"]
    assert [one["name"] for one in judged][:3] == ["base", "step-000002", "step-000004"]
    assert all("win_rate" in one["figures"] and "kl" in one["figures"] for one in judged)
    assert os.path.exists(tmp_path / "runs/policy/evaluation/win-rate-kl.svg")
    AutoModelForCausalLM.from_pretrained(tmp_path / "policy-for-others")
