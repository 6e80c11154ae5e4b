"""Whole runs through the command line: real DeepSpeed, one and two ranks, both samplers, resume, crash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import engine.run
from benchmarks import learning
from tests.system.helpers import ROOT, run_engine, run_here, steps

QUICK = ROOT / "configs" / "quickstart.yaml"


def short(model: str, out: Path, name: str) -> str:
    """Three steps of the quickstart from a random policy; a response that begins with an even token gets 1."""
    reward = "def even(completion_ids, **_):\n    return [float(ids[0] % 2 == 0) for ids in completion_ids]\n"
    (out / "even.py").write_text(reward)
    return (
        f"--config {QUICK} --model.path {model} --output_dir {out} --name {name} --reward.function {out}/even.py:even "
        "--train.steps 3 --eval.prompts 16 --rollout.prompts_per_step 8 --rollout.samples_per_prompt 4 "
        "--generation.max_logprob_gap 0.001 --generation.backend hf --ppo.value_warmup_steps 0 "
    )


def deadly_reward(folder: Path) -> str:
    """The option for a reward that kills its process in the third step."""
    (folder / "deadly.py").write_text(
        "import os, signal\nfrom even import even\ncalls = 0\n"
        "def reward(**batch):\n    global calls\n    calls += 1\n"
        "    if calls == 4:  # one evaluation, two steps\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return even(**batch)\n"
    )
    return "--reward.function deadly:reward"


def samples(run: Path, held_out: bool = False) -> list[dict]:
    """The samples of training steps in a run's file, or the responses of its evaluations."""
    rows = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    return [row for row in rows if row.get("held_out", False) == held_out]


def check_folder(run: Path, count: int, pictures: bool = True) -> dict:
    """Everything a run promises to leave."""
    assert [row["step"] for row in steps(run)] == list(range(1, count + 1))
    files = ("config.yaml", "samples.jsonl", "report.html", "model/config.json", "model/tokenizer.json")
    for name in (*files, *(["curves.png"] if pictures else [])):
        assert (run / name).stat().st_size > 0, name
    assert list((run / "tensorboard").iterdir())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    before, *later = [row["eval/reward"] for row in rows if "eval/reward" in row]
    assert (run / "best" / "model.safetensors").exists() == (max(later) > before), "the best policy, if it got better"
    summary = json.loads((run / "summary.json").read_text())
    for key in ("algo", "seed", "episodes", "reward_before", "reward_after", "seconds", "tokens_per_second"):
        assert summary[key] is not None, key
    assert summary["steps"] == count and summary["peak_memory_gib"] > 0
    assert {"torch", "deepspeed", "transformers"} <= summary["versions"].keys()
    return summary


def test_ppo_run_leaves_everything(tiny_model: str, tmp_path: Path) -> None:
    more = "--algo ppo --kl.coef 0.05 --train.minibatches_per_batch 2"
    result = run_here(short(tiny_model, tmp_path, "r") + more)
    run = tmp_path / "r"
    check_folder(run, 3)
    metrics = steps(run)
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

    AutoModelForCausalLM.from_pretrained(run / "model")


def test_grpo_run_with_its_kl_in_the_loss(tiny_model: str, tmp_path: Path) -> None:
    more = "--algo grpo --kl.coef 0.5 --train.minibatches_per_batch 1"
    run_here(short(tiny_model, tmp_path, "r") + more)
    check_folder(tmp_path / "r", 3)
    metrics = steps(tmp_path / "r")
    assert metrics[0]["policy/grad_norm"] > 0
    assert all(0 <= row["grpo/zero_advantage_fraction"] <= 1 for row in metrics)
    # Before the first step the policy is its reference: no KL, and whitened advantages of ratio 1 cancel in a group.
    assert abs(metrics[0]["policy/loss"]) < 0.2
    assert metrics[0]["kl/ref_mean"] == pytest.approx(0.0, abs=1e-5)
    assert abs(metrics[-1]["kl/ref_mean"]) > 1e-5


def test_value_warm_up_leaves_the_policy_alone_and_still_compares_weights(tiny_model: str, tmp_path: Path) -> None:
    more = "--algo ppo --ppo.value_warmup_steps 2 --train.learning_rate 1e-2 --train.warmup_steps 0"
    run_here(short(tiny_model, tmp_path, "w") + more)
    rows = steps(tmp_path / "w")
    assert ["policy/grad_norm" in row for row in rows] == [False, False, True]
    assert all(row["weights/logprob_gap_mean"] < 1e-4 and row["value/grad_norm"] > 0 for row in rows)


def test_killed_run_resumes_token_for_token(tiny_model: str, tmp_path: Path) -> None:
    """Four steps in one go, and the same run killed in its third step and resumed: same samples, same metrics."""
    more = "--algo rloo --save.every_steps 2 --save.samples_per_step 32 --kl.coef 0.05 --kl.target 3 --train.steps 4 "
    run_here(short(tiny_model, tmp_path, "whole") + more)
    deadly = deadly_reward(tmp_path)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    killed = run_engine(short(tiny_model, tmp_path, "parts") + more + deadly, ok=False, path=tmp_path)
    assert killed.returncode == -9
    # What a kill can leave besides: records beyond the checkpoint, a torn line, a half-written checkpoint.
    with (parts / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "time/step": 1.0}\n{"step": 4, "rew')
    (parts / "checkpoints" / "partial-step-000004").mkdir()
    run_here(f"--resume {parts} --reward.function {tmp_path}/even.py:even")
    assert samples(parts) == samples(whole) and len(samples(whole)) == 4 * 32
    assert samples(parts, held_out=True) == samples(whole, held_out=True) and samples(whole, held_out=True)
    for expected, got in zip(steps(whole)[2:], steps(parts)[2:], strict=True):
        for key, value in expected.items():
            if not key.startswith(("time/", "memory/", "tokens_per_second")):
                assert got[key] == pytest.approx(value, rel=1e-6, abs=1e-9), key
    summary = check_folder(parts, 4)
    assert summary["reward_before"] == json.loads((whole / "summary.json").read_text())["reward_before"]
    refused = run_here(f"--resume {parts}", ok=False)
    assert refused.returncode == 2 and "train.steps" in refused.stderr


@pytest.mark.slow
def test_two_ranks_zero3_learn_what_one_process_learns(tiny_model: str, tmp_path: Path) -> None:
    """The launcher, ZeRO-3 and the split over ranks change neither the rollouts nor what is learned from them.

    Half of what is learned from is a reward model's, sharded as well.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    judge = tmp_path / "judge"
    AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1).save_pretrained(judge)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(judge)
    more = f"--algo ppo --kl.coef 0.05 --train.minibatches_per_batch 1 --reward.model {judge} "
    run_engine(short(tiny_model, tmp_path, "one") + more)
    # As libraries' threads may do while the interpreter is taken down; a finished run is finished all the same.
    (tmp_path / "late.py").write_text("import atexit, os\nfrom even import even\natexit.register(os.abort)\n")
    two = "--reward.function late:even --launch.ranks 2 --train.zero_stage 3"
    run_engine(short(tiny_model, tmp_path, "two") + more + two, path=tmp_path)
    check_folder(tmp_path / "two", 3)
    keys = ("reward/mean", "rollout/response_tokens_mean", "policy/entropy", "policy/loss", "policy/grad_norm")
    for one, two in zip(steps(tmp_path / "one"), steps(tmp_path / "two"), strict=True):
        assert abs(one["reward/model_mean"]) > 1e-3 and one["reward/dropped_fraction"] == 0.0
        for key in (*keys, "value/loss", "value/grad_norm"):
            assert two[key] == pytest.approx(one[key], rel=2e-3, abs=1e-5), (one["step"], key)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_vllm_two_ranks_zero3(tiny_model: str, tmp_path: Path, staleness: int) -> None:
    """In turns, and by a thread beside the trainer."""
    pytest.importorskip("vllm")
    more = "--algo rloo --generation.backend vllm --launch.ranks 2 --train.zero_stage 3 --train.learning_rate 1e-3 "
    more += f"--memory.kv_cache_gib 0.25 --schedule.staleness {staleness}"
    run_engine(short(tiny_model, tmp_path, "v") + more)
    check_folder(tmp_path / "v", 3)
    rows = steps(tmp_path / "v")
    assert all(row["weights/logprob_gap_mean"] < 1e-4 for row in rows), "after large steps, too"
    assert [row["off_policy/staleness"] for row in rows] == [0, staleness, staleness]


def test_crash_leaves_a_report_and_a_failing_status(tiny_model: str, tmp_path: Path) -> None:
    """And before it an evaluation without a score, which is not taken for 0, the best so far."""
    (tmp_path / "bad.py").write_text(
        "scores = iter([-1.0, -1.0, None, float('nan')])  # before training, step 1, after it, step 2\n"
        "def reward(completions, **_):\n    return [next(scores)] * len(completions)\n"
    )
    more = f"--algo rloo --eval.every_steps 1 --reward.function {tmp_path}/bad.py:reward"
    run = tmp_path / "c"
    result = run_here(short(tiny_model, tmp_path, "c") + more, ok=False)
    assert "RewardError" in result.stderr and "for the prompt" in result.stderr
    assert "RewardError" in (run / "report.html").read_text()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["eval/reward"]) for row in rows if "eval/reward" in row] == [(0, -1.0)]
    assert result.stdout.count("No score after step 1") == 1 and not (run / "best").exists()


@pytest.mark.slow
def test_resume_takes_new_settings_and_refuses_other_runs(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new learning rate and KL coefficient hold; another algorithm, stage or precision is refused in one line."""
    run = tmp_path / "r"
    run_engine(short(tiny_model, tmp_path, "r") + "--algo ppo --train.steps 1 --kl.coef 0.01")
    config = (run / "config.yaml").read_text()
    others = ("--algo rloo", "--train.zero_stage 2", "--model.dtype bfloat16", "--seed 1", "--launch.ranks 2")
    for change in (*others, "--data.split other", "--train.minibatches_per_batch 2", "--name other"):
        assert engine.run.main(["--resume", str(run), "--train.steps", "2", *change.split()]) == 2
        assert capsys.readouterr().err.count("\n") == 1, change
        assert (run / "config.yaml").read_text() == config
    more = "--train.steps 2 --train.schedule constant --train.learning_rate 7e-6 --ppo.value_learning_rate 3e-6"
    run = run.rename(tmp_path / "moved, with a comma")
    run_engine(f"--resume '{run}' {more} --kl.coef 0.3 --kl.target 5")
    last = steps(run)[-1]
    assert (last["step"], last["kl/coef"]) == (2, 0.3)
    assert (last["policy/lr"], last["value/lr"]) == (pytest.approx(7e-6), pytest.approx(3e-6))
    # Killed after its last checkpoint and before its end: resuming finishes it.
    (run / "summary.json").unlink()
    run_engine(f"--resume '{run}'")
    assert json.loads((run / "summary.json").read_text())["reward_after"] is not None


@pytest.mark.slow
def test_user_mistakes_found_late_are_one_line_too(tiny_model: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"question": "1+2="}) + "\n")
    more = f"--data.task null --data.path {tmp_path}/p.jsonl --algo rloo"
    result = run_engine(short(tiny_model, tmp_path, "m") + more + " --launch.ranks 2", ok=False)
    assert result.returncode == 2 and "no column 'prompt'" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(600)
@pytest.mark.parametrize("algo", ["ppo", "rloo"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_quickstart_learns(algo: str, seed: int, tmp_path: Path) -> None:
    """Held-out greedy accuracy rises by at least 20 points from 30-50 percent, in under 100 s on two cores."""
    arguments = f"--algo {algo} --config {QUICK} --seed {seed} --output_dir {tmp_path} --name q"
    run_engine(arguments, timeout=580, threads=None)
    summary = json.loads((tmp_path / "q" / "summary.json").read_text())
    print(json.dumps(summary))
    assert 0.30 <= summary["accuracy_before"] <= 0.50
    assert summary["accuracy_after"] >= summary["accuracy_before"] + 0.20
    assert summary["seconds"] < 100


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["hf", "vllm"])
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("algo", learning.ALGORITHMS)
def test_every_algorithm_learns_on_either_schedule(algo: str, staleness: int, backend: str, tmp_path: Path) -> None:
    """To the end of the quickstart; benchmarks/results/learning-cpu.json has what came out here."""
    record = learning.run(algo, staleness, backend, 0, tmp_path, threads=1)
    print(json.dumps(record))
    assert record["accuracy_after"] >= record["accuracy_before"] + 0.15
