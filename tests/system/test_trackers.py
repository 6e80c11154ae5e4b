"""Copies of metrics for Weights & Biases and trackio, by their own packages; without either a run goes on."""

from __future__ import annotations

import importlib.util
import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine import run
from engine.report import Recorder
from tests import users
from tests.system.helpers import ROOT, run_here, unranked

WANDB = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")

BLOCK = 32768


def recorder(run_dir: Path, start_step: int = 0, **projects: str) -> Recorder:
    settings = {"train": {"learning_rate": 0.5}}
    return Recorder(
        run_dir, header={}, total_steps=9, start_step=start_step, live=False, projects=projects, settings=settings
    )


def logged(file: Path) -> list[dict[str, Any]]:
    """The history in a file of wandb's: records in blocks as in LevelDB's log, each in one part or several."""
    from wandb.proto import wandb_internal_pb2

    content, place, whole, found = file.read_bytes(), 7, b"", []
    while place + 7 <= len(content):
        if (left := BLOCK - place % BLOCK) < 7:  # a header has no room
            place += left
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # all of it, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                found.append({"/".join(one.nested_key) or one.key: json.loads(one.value_json) for one in items})
    return found


@WANDB
@pytest.mark.usefixtures("without_pictures")
def test_one_wandb_run_across_a_resume(tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    options = (
        "--algo sft --data.task addition --data.max_row_tokens 13 --train.rows_per_step 4 --eval.prompts 4 "
        f"--launch.device cpu --model.path {tiny_model} --output_dir {tmp_path} --report.wandb adders"
    )
    said = run_here(f"{options} --name run --train.steps 2").stdout
    assert f"Weights & Biases: offline; send it by: wandb sync {tmp_path}/run/wandb/offline-run-*" in said
    run_here(f"--resume {tmp_path}/run --train.steps 3")
    identity = json.loads((tmp_path / "run" / "trackers.json").read_text())["wandb"]
    files = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*/run-{identity}.wandb"))
    assert len(files) == 2 == len(list((tmp_path / "run" / "wandb").glob("offline-run-*")))
    history = [row for file in files for row in logged(file)]
    recorded = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    ours = [{key: value for key, value in row.items() if key[0] != "_"} for row in history]
    assert ours == [{key: value for key, value in row.items() if value is not None} for row in recorded]


@WANDB
def test_a_tracker_that_fails_is_one_line(tmp_path: Path) -> None:
    """At first nobody has logged in, and nobody is asked to; then its service is killed between two steps.

    In a process of its own: the package cannot begin anew in that one.
    """
    code = f"""
import os, signal, subprocess, time
from pathlib import Path
import wandb
from tests.system.test_trackers import recorder
folder = Path({str(tmp_path)!r})
one = recorder(folder / "begins", wandb="adders")
one.step(1, {{"policy/loss": 1.0}})
one.close({{}})
wandb.teardown()
os.environ["WANDB_MODE"] = "offline"
one = recorder(folder / "later", wandb="adders")
one.step(1, {{"policy/loss": 1.0}})
for pid in subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "wandb-core"], capture_output=True).stdout.split():
    os.kill(int(pid), signal.SIGKILL)
time.sleep(0.5)
for step in range(2, 6):
    one.step(step, {{"policy/loss": 1.0}})
one.close({{}})
print("done", flush=True)
os._exit(0)
"""
    env = {name: value for name, value in unranked().items() if not name.startswith("WANDB_")}
    env |= {"HOME": str(tmp_path), "WANDB_BASE_URL": "http://127.0.0.1:9"}
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and ended.stdout.endswith("done\n"), ended.stderr
    said = [line for line in ended.stdout.splitlines() if "Weights & Biases" in line]
    assert len(said) == 3 and said[0].startswith("Nothing goes to Weights & Biases: ")
    assert said[1].startswith("Weights & Biases: offline; ") and said[2].startswith("Nothing more goes to ")
    assert len((tmp_path / "begins" / "metrics.jsonl").read_text().splitlines()) == 1
    assert len((tmp_path / "later" / "metrics.jsonl").read_text().splitlines()) == 5


def test_one_trackio_run_across_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    store = tmp_path / "store"
    code = f"""
import os
from pathlib import Path
from tests.system.test_trackers import recorder
for start in (0, 2):
    one = recorder(Path({str(tmp_path / "run")!r}), start_step=start, trackio="adders")
    for step in (start + 1, start + 2, start + 3):
        one.step(step, {{"policy/loss": 1.0 / step}})
    one.close({{}})
other = recorder(Path({str(tmp_path / "other" / "run")!r}), trackio="adders")  # of the same name
other.step(1, {{"policy/loss": 7.0}})
other.close({{}})
os._exit(0)
"""
    env = unranked() | {"TRACKIO_DIR": str(store), "PYTHONPATH": ":".join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    with sqlite3.connect(store / "adders.db") as database:
        rows = database.execute("SELECT run_id, step, metrics FROM metrics ORDER BY id").fetchall()
    first, *_, last = (row[0] for row in rows)
    assert first != last
    assert [(run, step) for run, step, _ in rows] == [(first, i) for i in (1, 2, 3, 3, 4, 5)] + [(last, 1)]
    assert json.loads(rows[0][2]) == {"policy/loss": 1.0}


@pytest.mark.skipif(importlib.util.find_spec("trackio") is not None, reason="trackio is installed")
def test_a_package_that_is_not_there_is_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the working folder has a folder of its name, as trackers make them."""
    model = users.model_folder(tmp_path / "model")
    (tmp_path / "trackio").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    capsys.readouterr()
    assert run.main(users.arguments(tmp_path, model, "--report.trackio", "adders")) == 2
    said = capsys.readouterr().err
    assert said == (
        "error: the package trackio is missing, report.trackio needs it: pip install trackio, or .[trackio]\n"
    )
    assert not (tmp_path / "runs").exists()
