"""The recorder: what is on disk after a run, a crash and a resume."""

import json
import os
import time
from pathlib import Path

import pytest

from engine.machine import disk
from engine.report import Recorder, records
from engine.report.records import json_line, load_run, read_lines, write_atomically


def record(run_dir: Path, start_step: int = 0, total_steps: int = 10) -> Recorder:
    if (run_dir / records.TENSORBOARD).exists():  # TensorBoard sorts its files by the second in which they begin
        time.sleep(1 - time.time() % 1)
    return Recorder(run_dir, header={"algo": "ppo"}, total_steps=total_steps, start_step=start_step, live=False)


@pytest.mark.parametrize("name", [records.METRICS, records.NOTES, records.SUMMARY])
def test_a_folder_in_the_place_of_a_file_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(disk.WriteFailed) as failed:
        record(tmp_path, start_step=2)
    assert f"{tmp_path / name} could not be written: Is a directory" in str(failed.value)
    assert "make room" not in str(failed.value) and "\n" not in str(failed.value)


def steps(path: Path) -> list[int]:
    return [line["step"] for line in read_lines(path)]


def scalars(run_dir: Path, name: str) -> list[tuple[int, float]]:
    """What TensorBoard shows of one metric."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run_dir / records.TENSORBOARD))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(name)]


def test_every_step_is_on_disk_before_the_next_one(tmp_path: Path) -> None:
    recorder = record(tmp_path)
    recorder.step(1, {"reward/mean": 0.5})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "reward/mean": 0.5}
    recorder.samples(1, [{"prompt": "1+1=", "response": "2", "reward": 1.0}])
    assert json.loads((tmp_path / "samples.jsonl").read_text())["response"] == "2"
    recorder.close()


def test_values_that_are_not_finite_become_null_and_are_counted_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = record(tmp_path)
    for step in (1, 2):
        recorder.step(step, {"policy/loss": float("nan"), "kl/ref_mean": float("inf"), "reward/mean": 1.0})
    recorder.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text.splitlines()[0]) == {"step": 1, "policy/loss": None, "kl/ref_mean": None, "reward/mean": 1.0}
    assert recorder.not_finite == {"policy/loss": 2, "kl/ref_mean": 2}
    # Once a metric, not once a step: the log of a run gone wrong must stay readable.
    assert capsys.readouterr().out.count("policy/loss is nan") == 1
    assert "policy/loss at 2 steps (first: 1)" in (tmp_path / "report.html").read_text()


def test_numbers_of_other_libraries_are_written_as_numbers(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    recorder = record(tmp_path)
    recorder.step(1, {"a": numpy.float32(0.5), "b": 3})
    recorder.samples(1, [{"prompt": "p", "response": "r", "reward": numpy.float32("nan")}])
    recorder.close()
    assert list(read_lines(tmp_path / "metrics.jsonl")) == [{"step": 1, "a": 0.5, "b": 3.0}]
    assert next(read_lines(tmp_path / "samples.jsonl"))["reward"] is None


def test_resume_forgets_what_came_after_the_checkpoint_and_a_torn_last_line(tmp_path: Path) -> None:
    recorder = record(tmp_path)
    for step in range(1, 6):
        recorder.step(step, {"reward/mean": float(step)})
        recorder.samples(step, [{"prompt": "p", "response": str(step), "reward": 0.0}])
    recorder.evaluation(3, {"eval/accuracy": 0.25})
    recorder.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')

    resumed = record(tmp_path, start_step=3)
    assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3, 3]
    assert steps(tmp_path / "samples.jsonl") == [1, 2, 3]
    resumed.step(4, {"reward/mean": 40.0})
    resumed.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 3, 4]
    assert scalars(tmp_path, "reward/mean") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "a\xc3\n[3]\n{"no step": 1}\n{"step": 4, "a": NaN}\n{"step": 5')
    assert list(read_lines(path)) == [{"step": 1}, {"step": 4, "a": None}]


def test_a_new_run_in_an_old_folder_keeps_the_old_records_apart(tmp_path: Path) -> None:
    first = record(tmp_path)
    first.step(1, {"reward/mean": 1.0})
    first.close({"algo": "ppo"}, None)
    second = record(tmp_path)
    assert not (tmp_path / "summary.json").exists(), "the old end is not this run's"
    second.step(1, {"reward/mean": 2.0})
    second.close()
    assert [line["reward/mean"] for line in read_lines(tmp_path / "metrics.jsonl")] == [2.0]
    assert [line["reward/mean"] for line in read_lines(tmp_path / "previous-metrics.jsonl")] == [1.0]
    assert scalars(tmp_path, "reward/mean") == [(1, 2.0)]


def test_the_summary_is_written_in_one_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_atomically(path, "old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("killed here")))
    with pytest.raises(OSError, match="killed here"):
        write_atomically(path, "new")
    assert path.read_text() == "old"


def test_close_writes_the_summary(tmp_path: Path) -> None:
    record(tmp_path).close({"algo": "rloo", "accuracy_after": float("nan"), "versions": {"torch": "2"}})
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "algo": "rloo",
        "accuracy_after": None,
        "versions": {"torch": "2"},
    }
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_a_crash_leaves_its_reason_its_place_and_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = record(tmp_path)
    recorder.step(1, {"reward/mean": 1.0})
    with pytest.raises(RuntimeError) as caught, recorder.phase("train"):
        raise RuntimeError("out of <memory>")
    recorder.close(None, caught.value)
    crash = load_run(tmp_path).crash
    assert crash.startswith("RuntimeError: out of <memory>\nAfter step 1 of 10, during train.\n\nTraceback")
    page = (tmp_path / "report.html").read_text()
    assert "This run crashed" in page
    assert "RuntimeError: out of &lt;memory&gt;" in page
    assert "report.html" in capsys.readouterr().out.splitlines()[-1]
    assert not (tmp_path / "summary.json").exists()

    resumed = record(tmp_path, start_step=1)
    resumed.close({"algo": "ppo"})
    assert "crashed" not in (tmp_path / "report.html").read_text()


def test_a_report_that_fails_does_not_hide_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: Path) -> Path:
        raise ValueError("no ink")

    monkeypatch.setattr("engine.report.recorder.write_report", broken)
    record(tmp_path).close({"algo": "ppo"})
    assert (tmp_path / "summary.json").exists()
    assert "no ink" in capsys.readouterr().out


def test_half_a_character_survives_the_way_to_disk(tmp_path: Path) -> None:
    recorder = record(tmp_path)
    recorder.samples(1, [{"prompt": "p", "response": "\ud83d half", "reward": 0.0}])
    recorder.close()
    assert next(read_lines(tmp_path / "samples.jsonl"))["response"] == "\ud83d half"
    assert "half" in (tmp_path / "report.html").read_text()


def test_json_has_no_nan_at_any_depth() -> None:
    nan = float("nan")
    assert json.loads(json_line({"step": 1, "parts": {"a": [nan, 1.0]}})) == {"step": 1, "parts": {"a": [None, 1.0]}}
