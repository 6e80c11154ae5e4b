"""What the colocation benchmark makes of a run's metrics, and of a run that fails."""

from pathlib import Path

import pytest

from benchmarks import colocation, runs, schedules, steps

ROW = {
    "time/step": 10.0,
    "time/sleep": 0.1,
    "time/sync": 0.2,
    "time/digest": 0.01,
    "weights/logprob_gap_mean": 0.01,
    "weights/logprob_gap_p999": 0.05,
    "memory/peak_gib": 60.0,
    "memory/asleep_gib": 40.0,
    "memory/asleep_growth": 0.0,
    "memory/plan_error_train": 0.02,
    "memory/plan_error_generate": -0.03,
}


def test_metrics_of_a_run() -> None:
    first = ROW | {"time/sync": 9.0, "weights/logprob_gap_mean": 0.03, "memory/plan_error_train": 0.5}
    found = colocation.metrics([first, ROW, ROW | {"memory/asleep_growth": -0.01}])
    assert found["handover_cycle_s"] == pytest.approx(0.3) and found["handover_share"] == pytest.approx(0.03)
    assert found["gap_mean_nats"] == 0.03, "the worst step, the first included"
    assert found["plan_error"] == -0.03 and found["asleep_growth"] == -0.01 and found["peak_gib"] == 60.0
    assert found.keys() <= colocation.UNITS.keys() and "offload_s" not in found


def test_table_has_a_column_a_setting_and_no_empty_row() -> None:
    records = [
        {"setting": "a", "metric": "peak_gib", "value": 61.234},
        {"setting": "b", "metric": "peak_gib", "value": 5.0},
        {"setting": "b", "metric": "plan_error", "value": -0.01},
    ]
    lines = colocation.BENCHMARK.table(records).splitlines()
    assert lines[0] == "| metric | unit | a | b |"
    assert lines[2:] == ["| plan_error | share of the plan |  | -0.01 |", "| peak_gib | GiB | 61.23 | 5 |"]


def test_a_run_that_ends_early_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"time/step": 1}\n{"time/st')
    with pytest.raises(SystemExit, match=r"status 3 after 1 step"):
        runs.run_steps(["-c", "raise SystemExit(3)"], tmp_path, 2)
    assert runs.run_steps(["-c", "import time; time.sleep(60)"], tmp_path, 1) == [{"time/step": 1}]


def test_metrics_of_a_schedule_leave_the_first_steps_out() -> None:
    row = {"time/step": 4.0, "idle/train": 0.5, "idle/generate": 0.25, "tokens_per_second": 9.0}
    first = {name: 100 * value for name, value in row.items()}
    found = schedules.metrics([first, first, row, row | {"off_policy/staleness": 1.0}])
    expected = {"step_s": 4.0, "idle_train": 0.5, "idle_generate": 0.25, "tokens_per_second": 9.0, "staleness": 1.0}
    assert found == expected and found.keys() <= schedules.UNITS.keys()


def test_metrics_of_a_step_are_the_same_on_both_sides() -> None:
    engine = {"time/step": 8.0, "time/generate": 3.0, "time/sleep": 0.5, "time/sync": 0.5, "time/train": 4.0}
    row = steps.complete(engine | {"rollout/response_tokens_mean": 500.0, "memory/driver_gib": 60.0})
    found = steps.metrics([row | {"time/step": 99.0}] * 2 + [row])
    assert found["step_s"] == 8.0 and found["sampling_s"] == 4.0 and found["peak_gib"] == 60.0
    assert found["response_tokens_per_second"] == 500 * 256 / 8
    assert found.keys() <= steps.UNITS.keys()


def test_trl_makes_one_optimizer_step_of_what_it_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "card", lambda: "a GPU")
    options = steps.BENCHMARK.parser().parse_args(["--trl-batch", "64"])
    command = steps.BENCHMARK.command("trl", options)
    assert "--per_device_train_batch_size 64 --gradient_accumulation_steps 4 --use_vllm true" in command
    assert steps.BENCHMARK.command("tandem", options).startswith("python -m engine.run --model.dtype bfloat16")
