"""Generation on ranks of its own, and one batch ahead: every algorithm, both samplers, kill and resume, crashes."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system import schedules
from tests.system.helpers import run_engine, run_here, run_ranks, steps
from tests.system.test_runs import check_folder, deadly_reward, samples, short

BACKENDS = ["hf", *([pytest.param("vllm", marks=pytest.mark.slow)] if importlib.util.find_spec("vllm") else [])]


@pytest.fixture(scope="module")
def runs(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Three steps of every algorithm, synchronous and one step off-policy, through a sampler."""

    @functools.cache
    def through(backend: str) -> Path:
        folder = tmp_path_factory.mktemp("schedules")
        short(tiny_model, folder, "")  # writes the reward
        run_ranks(2, schedules.__file__, tiny_model, str(folder), backend, timeout=280)
        return folder

    return through


def evaluated(run: Path) -> list[dict]:
    """The evaluations recorded in a run folder."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "eval/reward" in row]


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("algo", schedules.ALGORITHMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_algorithm_on_either_schedule(
    runs: Callable[[str], Path], backend: str, algo: str, staleness: int
) -> None:
    run = runs(backend) / f"{backend}-{algo}-{staleness}"
    check_folder(run, 3, pictures=False)
    rows = steps(run)
    assert [row["off_policy/staleness"] for row in rows] == [0, staleness, staleness]
    assert all(row["policy/grad_norm"] > 0 for row in rows)
    gaps = [row["weights/logprob_gap_mean"] for row in rows if "weights/logprob_gap_mean" in row]
    assert len(gaps) == 3 - staleness and max(gaps) < 1e-4, "the sampler has proved every hand-over"
    assert all(0 <= row["idle/train"] <= 1 and 0 <= row["idle/generate"] <= 1 for row in rows)
    evaluations = evaluated(run)
    assert [row["step"] for row in evaluations] == [0, 3]
    assert all(row["eval/best@2"] >= row["eval/reward"] for row in evaluations)
    corrected = algo in ("ppo", "rloo", "grpo") and (staleness > 0 or backend == "vllm")
    assert ("off_policy/ratio_mean" in rows[1]) == corrected
    assert all(math.isfinite(row["kl/ref_mean"]) for row in rows if "kl/ref_mean" in row)


@pytest.mark.slow
def test_a_split_run_without_staleness_is_the_colocated_run(
    runs: Callable[[str], Path], tiny_model: str, tmp_path: Path
) -> None:
    """Who samples makes no difference: the same responses, and the same learnt from them."""
    one = schedules.config(tiny_model, str(runs("hf")), "hf", "rloo", 0)
    more = f"--algo rloo --train.learning_rate {one.train.learning_rate}"
    run_here(short(tiny_model, tmp_path, "one") + more)
    assert samples(tmp_path / "one") == samples(runs("hf") / "hf-rloo-0")
    for here, there in zip(steps(tmp_path / "one"), steps(runs("hf") / "hf-rloo-0"), strict=True):
        for key in ("reward/mean", "policy/entropy", "policy/loss", "policy/grad_norm"):
            assert there[key] == pytest.approx(here[key], rel=1e-6, abs=1e-9), key


AHEAD = (
    "--algo rloo --save.every_steps 2 --save.samples_per_step 32 --train.steps 4 --schedule.staleness 1 "
    "--train.learning_rate 1e-3 --eval.every_steps 0 "
)


def check_resumed(whole: Path, parts: Path) -> None:
    """The same samples, of the same versions; no prompt is skipped or comes twice in an epoch."""
    assert samples(parts) == samples(whole) and len(samples(whole)) == 4 * 32
    assert [row["policy_version"] for row in samples(whole)[::32]] == [0, 0, 1, 2]
    assert len({row["prompt"] for row in samples(parts)}) == 4 * 8, "every prompt of the epoch once"
    for expected, got in zip(steps(whole), steps(parts), strict=True):
        for key in ("reward/mean", "off_policy/ratio_mean", "policy/loss", "policy/grad_norm", "progress/epoch"):
            assert got[key] == pytest.approx(expected[key], rel=1e-6, abs=1e-9), key


@pytest.mark.slow
def test_a_batch_that_a_thread_drew_ahead_is_in_the_checkpoint(tiny_model: str, tmp_path: Path) -> None:
    run_engine(short(tiny_model, tmp_path, "whole") + AHEAD)
    parts = shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(parts / "checkpoints" / "step-000004")
    run_engine(f"--resume {parts}")
    check_resumed(tmp_path / "whole", parts)
    proofs = [row["weights/logprob_gap_mean"] for row in steps(parts) if "weights/logprob_gap_mean" in row]
    assert len(proofs) == 4 and max(proofs) < 1e-4, "by the first batch, and at three hand-overs"
    run_engine(f"--resume {parts} --train.steps 5")  # nothing in flight: the next batch is of the newest weights
    assert steps(parts)[4]["off_policy/staleness"] == 0 and samples(parts)[-1]["policy_version"] == 4


@pytest.mark.slow
def test_a_killed_split_run_resumes_with_the_batch_in_flight(tiny_model: str, tmp_path: Path) -> None:
    """Sampled by older weights than those in the checkpoint."""
    more = AHEAD + "--schedule.placement split "
    run_engine(short(tiny_model, tmp_path, "whole") + more)
    deadly = deadly_reward(tmp_path)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_engine(short(tiny_model, tmp_path, "parts") + more + deadly, ok=False, path=tmp_path)
    run_engine(f"--resume {parts} --reward.function {tmp_path}/even.py:even")
    check_resumed(whole, parts)


@pytest.mark.slow
def test_either_side_takes_the_other_down_and_says_why(tiny_model: str, tmp_path: Path) -> None:
    """An exception of the sampler's, with its traceback in the run's folder; a killed sampler."""
    split = "--algo rloo --schedule.placement split --schedule.staleness 1 --train.steps 50 --eval.every_steps 0 "
    started = time.monotonic()
    broken = "--train.learning_rate 1e30 --train.max_grad_norm 0"
    failed = run_engine(short(tiny_model, tmp_path, "a") + split + broken, ok=False)
    assert "rank 1 failed" in failed.stderr and "diverged" in failed.stderr, failed.stderr[-2000:]
    assert "Traceback" in (tmp_path / "a" / "crash-rank-1.txt").read_text()
    assert "diverged" in (tmp_path / "a" / "report.html").read_text()
    (tmp_path / "deadly.py").write_text(
        "import os, signal, psutil\nfrom even import even\ncalls = 0\n"
        "def reward(**batch):\n    global calls\n    calls += 1\n"
        "    if calls == 3:\n"
        "        others = [one for one in psutil.Process(os.getppid()).children() if one.pid != os.getpid()]\n"
        "        [one.kill() for one in others if 'engine.run' in one.cmdline()]\n"
        "    return even(**batch)\n"
    )
    killed = run_engine(
        short(tiny_model, tmp_path, "b") + split + "--reward.function deadly:reward", ok=False, path=tmp_path
    )
    assert "rank 1 failed" in killed.stderr and "SIGKILL" in killed.stderr, killed.stderr[-2000:]
    assert time.monotonic() - started < 100
