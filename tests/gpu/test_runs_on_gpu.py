"""Whole runs on one GPU: the embedded task with CUDA, and a model of Qwen2-0.5B's shape in bf16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu.models import random_qwen2
from tests.system.helpers import ROOT, run_engine, steps

pytestmark = pytest.mark.gpu

QUICK = ROOT / "configs" / "quickstart.yaml"


@pytest.mark.parametrize("algo", ["ppo", "rloo"])
def test_embedded_task_learns_with_cuda(algo: str, tmp_path: Path) -> None:
    arguments = f"--algo {algo} --config {QUICK} --train.steps 60 --launch.ranks 1 --output_dir {tmp_path} --name r"
    result = run_engine(arguments, threads=None)
    assert "device cuda" in result.stdout
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    print(json.dumps(summary))
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.05
    assert all(row["weights/logprob_gap_mean"] < 1e-3 for row in steps(tmp_path / "r"))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Qwen2-0.5B's shape."""
    return random_qwen2(
        tmp_path_factory.mktemp("qwen"),
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
    )


@pytest.mark.parametrize("algo", ["ppo", "rloo"])
def test_qwen_half_billion_shape(algo: str, qwen: str, tmp_path: Path) -> None:
    rows = [{"prompt": " ".join(f"w{3 + (7 * i + j) % 1900}" for j in range(24))} for i in range(64)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "mine.py").write_text(
        "def odd(completion_ids, **_):\n    return [sum(t % 2 for t in ids) / len(ids) for ids in completion_ids]\n"
    )
    run_engine(
        f"--algo {algo} --model.path {qwen} --model.dtype bfloat16 --model.gradient_checkpointing true "
        f"--data.path {tmp_path}/prompts.jsonl --reward.function {tmp_path}/mine.py:odd --train.zero_stage 1 "
        "--rollout.prompts_per_step 8 --rollout.samples_per_prompt 4 --rollout.max_prompt_tokens 64 --train.steps 3 "
        "--rollout.max_response_tokens 64 --train.tokens_per_microbatch 2048 --launch.ranks 1 "
        f"--output_dir {tmp_path} --name q",
        threads=None,
    )
    rows = steps(tmp_path / "q")
    print(json.dumps(rows[-1]))
    assert len(rows) == 3 and all(row["policy/grad_norm"] > 0 for row in rows)
    assert all(row["weights/logprob_gap_mean"] < 0.05 for row in rows)
