"""Whole runs through the command line: real DeepSpeed, one and two ranks, both samplers, resume, crash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.system.helpers import ROOT, run_engine

QUICK = str(ROOT / "configs" / "quickstart.yaml")


def short(model: str, out: Path, *more: str) -> list[str]:
    """Three steps of the quickstart from a random policy; nothing to learn, everything to run."""
    return ["--config", QUICK, "--model.path", model, "--output_dir", str(out), "--train.steps", "3",
            "--rollout.prompts_per_step", "8", "--rollout.samples_per_prompt", "4", "--eval.prompts", "16",
            "--generation.max_logprob_gap", "0.001", *more]  # fmt: skip


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_folder(run: Path, steps: int) -> dict:
    """Everything a run promises to leave."""
    metrics = [row for row in lines(run / "metrics.jsonl") if "time/step" in row]
    assert [row["step"] for row in metrics] == list(range(1, steps + 1))
    for name in ("config.yaml", "samples.jsonl", "report.html", "curves.png", "model/config.json", "model/tokenizer.json"):
        assert (run / name).stat().st_size > 0, name
    assert list((run / "tensorboard").iterdir())
    summary = json.loads((run / "summary.json").read_text())
    for key in ("algo", "seed", "steps", "episodes", "accuracy_before", "accuracy_after", "seconds", "tokens_per_second",
                "peak_memory_gib"):  # fmt: skip
        assert summary[key] is not None, key
    assert summary["steps"] == steps and {"torch", "deepspeed", "transformers"} <= summary["versions"].keys()
    return summary


def test_ppo_run_leaves_everything(tiny_model: str, tmp_path: Path) -> None:
    result = run_engine("--algo", "ppo", *short(tiny_model, tmp_path, "--name", "r", "--kl.coef", "0.05",
                                                "--train.minibatches_per_batch", "2"))  # fmt: skip
    check_folder(tmp_path / "r", 3)
    metrics = [row for row in lines(tmp_path / "r" / "metrics.jsonl") if "time/step" in row]
    assert metrics[0]["kl/ref_mean"] == pytest.approx(0.0, abs=1e-5), "the policy starts as its reference"
    assert abs(metrics[-1]["kl/ref_mean"]) > 1e-5
    assert all(row["policy/grad_norm"] > 0 and row["value/grad_norm"] > 0 for row in metrics)
    assert all(row["weights/logprob_gap_mean"] < 1e-4 for row in metrics), "sampler and trainer hold the same weights"
    for phase in ("generate", "reward", "old", "ref", "value", "train", "sync"):
        assert metrics[0][f"time/{phase}"] >= 0
    assert "report.html" in result.stdout and "--resume" in result.stdout
    assert "8 prompts x 4 samples = 32 episodes" in result.stdout
    assert "\x1b[" not in result.stdout, "plain lines when not on a terminal"
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tmp_path / "r" / "model")


def test_killed_run_resumes_token_for_token(tiny_model: str, tmp_path: Path) -> None:
    """Four steps in one go, and two steps, then two more from the checkpoint: same samples, same metrics."""
    common = ["--algo", "rloo", "--save.every_steps", "2", "--save.samples_per_step", "32", "--kl.coef", "0.05",
              "--kl.target", "3"]  # fmt: skip
    run_engine(*short(tiny_model, tmp_path, *common, "--name", "whole", "--train.steps", "4"))
    run_engine(*short(tiny_model, tmp_path, *common, "--name", "parts", "--train.steps", "2"))
    # What a kill in step 3 leaves: records beyond the checkpoint, a torn line, a half-written checkpoint.
    parts = tmp_path / "parts"
    with (parts / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "time/step": 1.0}\n{"step": 4, "rew')
    (parts / "checkpoints" / "partial-step-000004").mkdir()
    run_engine("--resume", str(parts), "--train.steps", "4")
    whole, resumed = (lines(tmp_path / name / "samples.jsonl") for name in ("whole", "parts"))
    assert resumed == whole and len(whole) == 4 * 32
    for a, b in zip(lines(tmp_path / "whole" / "metrics.jsonl"), lines(parts / "metrics.jsonl"), strict=False):
        if "time/step" in a and a["step"] > 2:
            for key, value in a.items():
                if not key.startswith(("time/", "memory/", "tokens_per_second")):
                    assert b[key] == pytest.approx(value, rel=1e-6, abs=1e-9), key
    summary = check_folder(parts, 4)
    assert summary["accuracy_before"] == json.loads((tmp_path / "whole" / "summary.json").read_text())["accuracy_before"]
    refused = run_engine("--resume", str(parts), ok=False)
    assert refused.returncode == 2 and "train.steps" in refused.stderr


def test_two_ranks_zero3_sample_what_one_process_samples(tiny_model: str, tmp_path: Path) -> None:
    """The launcher, ZeRO-3 and the split over ranks change neither the first rollout nor what is learned from it."""
    common = ["--algo", "ppo", "--save.samples_per_step", "4", "--kl.coef", "0.05"]
    run_engine(*short(tiny_model, tmp_path, *common, "--name", "one"))
    run_engine(*short(tiny_model, tmp_path, *common, "--name", "two", "--launch.ranks", "2", "--train.zero_stage", "3"))
    check_folder(tmp_path / "two", 3)
    one, two = ([row for row in lines(tmp_path / n / "metrics.jsonl") if "time/step" in row] for n in ("one", "two"))
    for key in ("reward/mean", "rollout/response_tokens_mean", "policy/entropy", "policy/loss", "policy/grad_norm",
                "value/loss", "value/grad_norm"):  # fmt: skip
        for step in range(3):
            assert two[step][key] == pytest.approx(one[step][key], rel=2e-3, abs=1e-5), (step, key)


def test_vllm_two_ranks_zero3(tiny_model: str, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    run_engine("--algo", "rloo", *short(tiny_model, tmp_path, "--name", "v", "--generation.backend", "vllm",
                                        "--launch.ranks", "2", "--train.zero_stage", "3", "--train.learning_rate", "1e-3",
                                        "--generation.cpu_kv_cache_gib", "0.25"))  # fmt: skip
    check_folder(tmp_path / "v", 3)
    metrics = [row for row in lines(tmp_path / "v" / "metrics.jsonl") if "time/step" in row]
    assert all(row["weights/logprob_gap_mean"] < 1e-4 for row in metrics), "after large steps, too"


def test_crash_leaves_a_report_and_a_failing_status(tiny_model: str, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "calls = 0\ndef reward(completions, **_):\n    global calls\n    calls += 1\n"
        "    return [float('nan') if calls > 2 else 0.0] * len(completions)\n"
    )
    result = run_engine("--algo", "rloo", *short(tiny_model, tmp_path, "--name", "c", "--reward.function",
                                                 f"{tmp_path}/bad.py:reward"), ok=False)  # fmt: skip
    assert "RewardError" in result.stderr and "for the prompt" in result.stderr
    assert "RewardError" in (tmp_path / "c" / "report.html").read_text()


def test_a_failing_rank_ends_the_run(tiny_model: str, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "import os\ndef reward(completions, **_):\n    assert os.environ['RANK'] == '0', 'rank one fails'\n"
        "    return [0.0] * len(completions)\n"
    )
    result = run_engine("--algo", "rloo", *short(tiny_model, tmp_path, "--name", "c", "--launch.ranks", "2",
                                                 "--reward.function", f"{tmp_path}/bad.py:reward"), ok=False, timeout=120)  # fmt: skip
    assert "rank one fails" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["ppo", "rloo"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_quickstart_learns(algo: str, seed: int, tmp_path: Path) -> None:
    """Held-out greedy accuracy rises by at least 20 points from 30-50 percent, in under 100 s of training on two cores."""
    run_engine("--algo", algo, "--config", QUICK, "--seed", str(seed), "--output_dir", str(tmp_path), "--name", "q",
               timeout=600, threads=None)  # fmt: skip
    summary = json.loads((tmp_path / "q" / "summary.json").read_text())
    assert 0.30 <= summary["accuracy_before"] <= 0.50
    assert summary["accuracy_after"] >= summary["accuracy_before"] + 0.20
    assert summary["seconds"] < 100
