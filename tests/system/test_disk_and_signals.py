"""Runs that meet a full disk or a signal that is swallowed, and refusals of several ranks: what is left, and said."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import engine.run
from tests import users
from tests.system.helpers import ROOT, run_engine, steps


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """What a run does to this process's signals ends with it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    hooks = sys.unraisablehook, threading.excepthook
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    sys.unraisablehook, threading.excepthook = hooks


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its checkpoints have 8 MB: two of them, but not three, fit on a disk of 20 MB."""
    return users.model_folder(
        tmp_path_factory.mktemp("model") / "large", _llama(hidden_size=128, intermediate_size=720, num_hidden_layers=2)
    )


def _llama(**changes: int) -> object:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=16, num_attention_heads=4, max_position_embeddings=128, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, tie_word_embeddings=False, **changes,
    )  # fmt: skip


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 20 MB, where the system lets us have one."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("no right to mount; test_a_file_that_cannot_grow is the same without one")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk(tmp_path: Path, small_disk: Path, large_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--output_dir", str(small_disk), "--save.every_steps", "1", "--train.steps", "4"]
    assert engine.run.main(users.arguments(tmp_path, large_model, *more)) == 1
    printed, run = capsys.readouterr(), small_disk / "run"
    assert "GiB free, and the run may need" in " ".join(printed.out.split())
    assert printed.err.count("\n") == 1, printed.err
    final = run / "checkpoints" / "step-000003"
    assert f"error: {final} could not be written: No space left on device" in printed.err
    assert sorted(os.listdir(run / "checkpoints")) == ["step-000001", "step-000002"]
    assert "could not be written" in (run / "crash.txt").read_text().splitlines()[0]
    assert "No space left on device" in (run / "report.html").read_text()
    # With room, it goes on.
    shutil.rmtree(run / "checkpoints" / "step-000001")
    assert engine.run.main(["--resume", str(run), "--train.steps", "2"]) == 0
    assert (run / "model" / "config.json").is_file()


@pytest.fixture
def limit() -> Iterator[None]:
    """Files that this process writes cannot grow beyond what ``limited`` says; the rest of the test is free of it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def limited(kilobytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes * 1024, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.parametrize(
    "torn,more",
    [
        ("checkpoints/step-000001", ["--save.every_steps", "1"]),
        ("best", ["--eval.every_steps", "1", "--save.every_steps", "0"]),
    ],
    ids=["checkpoint", "export"],
)
def test_a_file_that_cannot_grow(
    tmp_path: Path, large_model: Path, limit: None, capsys: pytest.CaptureFixture[str], torn: str, more: list[str]
) -> None:
    held_out = users.write_rows(tmp_path / "held.jsonl", [{"prompt": "h g", "answer": "a"}])
    arguments = users.arguments(tmp_path, large_model, "--data.eval_path", str(held_out), *more)
    # Better every time, so that the policy is the best one.
    (tmp_path / "reward.py").write_text(
        "calls = 0\ndef score(completions, **_):\n    global calls\n    calls += 1\n"
        "    return [float(calls)] * len(completions)\n"
    )
    limited(1024)
    assert engine.run.main(arguments) == 1
    error, run = capsys.readouterr().err, tmp_path / "runs" / "run"
    assert error.startswith(f"error: {run / torn} could not be written: ") and error.count("\n") == 1, error
    assert not list(run.rglob("partial-*")) and not (run / torn).exists()
    assert "could not be written" in (run / "crash.txt").read_text()
    assert (run / "report.html").is_file()


def test_metrics_that_cannot_grow(
    tmp_path: Path, large_model: Path, limit: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are what a run leaves; one that could not write them would go on for nobody."""
    arguments = users.arguments(tmp_path, large_model)
    (tmp_path / "reward.py").write_text(
        "import resource\n"
        "def score(completions, **_):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))\n"
        "    return [0.0] * len(completions)\n"
    )
    assert engine.run.main(arguments) == 1
    error, run = capsys.readouterr().err, tmp_path / "runs" / "run"
    assert error.startswith(f"error: {run / 'metrics.jsonl'} could not be written: File too large"), error
    assert error.count("\n") == 1, error


SWALLOWS = """
import os, signal, time
calls = 0
def score(prompts, completions, **columns):
    global calls
    calls += 1
    if calls == 2:
        try:
            os.kill(os.getpid(), signal.{name})
            time.sleep(0.5)
        except:
            pass
    return [float(len(text)) for text in completions]
"""


@pytest.mark.parametrize("name,status", [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_swallowed_signal_ends_the_run_after_its_step(
    tmp_path: Path, large_model: Path, name: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments = users.arguments(tmp_path, large_model, "--train.steps", "50", "--save.every_steps", "0")
    (tmp_path / "reward.py").write_text(SWALLOWS.replace("{name}", name))
    assert engine.run.main(arguments) == status
    run = tmp_path / "runs" / "run"
    assert capsys.readouterr().err == "interrupted\n"
    assert len(steps(run)) == 2 and os.listdir(run / "checkpoints") == ["step-000002"]
    assert "was stopped by hand" in (run / "report.html").read_text()
    assert not (run / "model").exists()
    assert engine.run.main(["--resume", str(run), "--train.steps", "3"]) == 0, "it goes on from there"
    assert len(steps(run)) == 3


ENDLESS = """
import os, signal, threading, time
from engine.launch import signals
signals.AGAIN = 0.2
def again():
    for _ in range(3):
        time.sleep(0.4)
        os.kill(os.getpid(), signal.SIGTERM)
signal.signal(signal.SIGINT, signal.default_int_handler)
signals.stop_on_sigterm(is_rank=False)
threading.Thread(target=again, daemon=True).start()
while True:
    try:
        while True:
            time.sleep(0.01)
    except:
        print("swallowed", signals.stop_requested(), flush=True)
"""


def test_a_third_signal_ends_what_swallows_two() -> None:
    done = subprocess.run([sys.executable, "-c", ENDLESS], cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "swallowed 15\n" * 2), done.stderr


def test_two_ranks_refuse_in_one_line(tmp_path: Path, large_model: Path) -> None:
    """What only the ranks find: here a prompt column that no row has. Nothing is left of the run."""
    arguments = users.arguments(tmp_path, large_model, "--launch.ranks", "2", "--data.prompt_column", "typo")
    refused = run_engine(" ".join(arguments), ok=False, timeout=100)
    assert refused.returncode == 2, refused.stderr
    assert refused.stderr.startswith("error: ") and refused.stderr.count("\n") == 1, refused.stderr
    assert "typo" in refused.stderr and not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_two_ranks_stop_for_a_signal_that_one_swallowed(tmp_path: Path, large_model: Path) -> None:
    arguments = users.arguments(tmp_path, large_model, "--train.steps", "50", "--launch.ranks", "2")
    (tmp_path / "reward.py").write_text(
        SWALLOWS.replace("{name}", "SIGTERM").replace("calls == 2", "calls == 2 and os.environ['RANK'] == '1'")
    )
    ended = run_engine(" ".join(arguments), ok=False, timeout=100)
    run = tmp_path / "runs" / "run"
    assert os.listdir(run / "checkpoints") == ["step-000002"], ended.stderr
    assert json.loads((run / "checkpoints" / "step-000002" / "state.json").read_text())["step"] == 2
    assert "was stopped by hand" in (run / "report.html").read_text()
    assert (ended.returncode, ended.stderr) == (143, "interrupted\n")
