"""Sampler and trainer on the same GPUs: real sleep, real hand-overs, memory that comes back."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import turns
from tests.gpu.models import small_qwen2
from tests.gpu.test_ranks_on_gpu import HELD, used
from tests.system.helpers import ROOT, run_engine, run_ranks, steps
from tests.system.test_signals import until

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_qwen2(tmp_path_factory.mktemp("model"))


def take_turns(ranks: int, *arguments: object) -> None:
    print(run_ranks(ranks, turns.__file__, *map(str, arguments), timeout=400))


@pytest.mark.parametrize(
    "sleep, holding", [("kv", "copied"), ("kv", "shared"), ("level1", "copied"), ("level2", "copied")]
)
def test_twenty_cycles_and_a_large_step(model: str, sleep: str, holding: str) -> None:
    """Equal tokens, level memory, agreement afterwards; and closing gives the memory back."""
    take_turns(1, model, 2, 1, sleep, holding)


@pytest.mark.parametrize("stage, tensor_parallel, sleep", [(2, 1, "level2"), (3, 1, "kv"), (3, 2, "level2")])
def test_two_gpus(model: str, stage: int, tensor_parallel: int, sleep: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    take_turns(2, model, stage, tensor_parallel, sleep, "copied")


def arguments(model: str, folder: Path, more: str) -> str:
    rows = [{"prompt": " ".join(f"w{3 + (7 * i + j) % 1900}" for j in range(24))} for i in range(64)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "odd.py").write_text(
        "def odd(completion_ids, **_):\n    return [sum(t % 2 for t in ids) / len(ids) for ids in completion_ids]\n"
    )
    return (
        f"--algo ppo --model.path {model} --model.dtype bfloat16 --data.path {folder}/prompts.jsonl "
        f"--reward.function {folder}/odd.py:odd --generation.backend vllm --rollout.prompts_per_step 16 "
        "--rollout.samples_per_prompt 4 --rollout.max_prompt_tokens 64 --rollout.max_response_tokens 128 "
        f"--launch.ranks 1 --output_dir {folder} --name r {more}"
    )


@pytest.mark.parametrize(
    "more",
    ["--memory.sleep level2 --memory.offload on --memory.zero_copy off", "--memory.sleep kv --memory.zero_copy auto"],
)
def test_runs_that_sleep(model: str, tmp_path: Path, more: str) -> None:
    result = run_engine(arguments(model, tmp_path, f"--train.zero_stage 2 --train.steps 4 {more}"), threads=None)
    assert "decision" in result.stdout
    rows = steps(tmp_path / "r")
    print(json.dumps(rows[-1]))
    assert len(rows) == 4 and all(row["weights/logprob_gap_mean"] < 0.02 for row in rows)
    assert all(row["memory/asleep_gib"] < row["memory/generate_gib"] for row in rows)
    assert abs(rows[-1]["memory/asleep_growth"]) < 0.01
    assert {"memory/plan_error_generate", "memory/plan_error_train", "time/sleep"} <= rows[-1].keys()


def test_kill_9_frees_the_gpu(model: str, tmp_path: Path) -> None:
    """While an engine sleeps and wakes."""
    before = used()
    command = arguments(model, tmp_path, "--train.steps 100000 --memory.sleep level2 --memory.zero_copy off")
    with (tmp_path / "output").open("w") as output:
        run = subprocess.Popen(
            [sys.executable, "-m", "engine.run", *shlex.split(command)],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    metrics = tmp_path / "r" / "metrics.jsonl"
    try:
        assert until(lambda: run.poll() is not None or (metrics.exists() and steps(tmp_path / "r")), 240)
        assert run.poll() is None, (tmp_path / "output").read_text()
        assert any(now > free + HELD for now, free in zip(used(), before, strict=True))
        os.kill(run.pid, signal.SIGKILL)
        assert until(lambda: all(now <= free + HELD for now, free in zip(used(), before, strict=True)), 10), used()
    finally:
        run.kill()
        run.wait()
