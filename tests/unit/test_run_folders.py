"""What belongs to a run in its folder, and where a run may have one; everything else there stays as it is."""

from __future__ import annotations

import errno
import json
import os
import signal
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import torch

import engine.run
from engine.config import Config, ConfigError, cli
from engine.data.prompts import Prompt
from engine.data.stream import Stream
from engine.launch import failures, signals
from engine.machine import disk
from engine.machine.world import World
from engine.rollouts.source import Batch, Source
from engine.run_folder import checkpoints, folder, in_flight
from engine.sample import Sample
from engine.tasks import addition
from tests import users

QUICK = ["--data.task", "addition", "--launch.device", "cpu"]


class Engine:
    """Saves as DeepSpeed's does: one file in a folder of the tag's name."""

    def save_checkpoint(self, folder: str, tag: str, **_: object) -> None:
        (Path(folder) / tag).mkdir()
        (Path(folder) / tag / "mp_rank_00_model_states.pt").write_bytes(b"weights")


class Trainer:
    engines = {"policy": Engine()}  # noqa: RUF012


@pytest.fixture
def save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes the checkpoint of a step as a run of one rank does."""
    monkeypatch.setattr(World, "barrier", lambda _: None)
    world = World(0, 1, torch.device("cpu"))

    def saving(step: int, keep: int = 1) -> Path:
        return checkpoints.save(tmp_path, checkpoints.OnlineTrainerState(step=step), Trainer(), [], world, keep)  # type: ignore

    return saving


def rewrite(checkpoint: Path, **changes: object) -> None:
    users.edit_json(checkpoint / "state.json", **changes)


STRAYS = {
    "a short number": ("step-9999", True, ""),
    "a word": ("step-final", True, ""),
    "one's own choice": ("step-best", True, ""),
    "a copy": ("step-000002.bak", True, ""),
    "a file": ("step-000009", False, ""),
    "no state": ("step-000009", True, "it has no state.json"),
}


@pytest.mark.parametrize("name,directory,fault", STRAYS.values(), ids=STRAYS)
def test_stray_folders_are_no_checkpoints(tmp_path: Path, save, name: str, directory: bool, fault: str) -> None:
    save(1)
    stray = tmp_path / "checkpoints" / name
    if directory:
        stray.mkdir()
    (stray / "mine" if directory else stray).write_text("precious")
    for step in (2, 3, 4):
        newest = save(step)
        assert checkpoints.newest(tmp_path) == newest
    assert (stray / "mine" if directory else stray).read_text() == "precious"
    assert checkpoints.torn(tmp_path) == ([f"{stray} is left out: {fault}"] if fault else [])
    whole = sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path != stray)
    assert whole == ["step-000003", "step-000004"]


def test_a_link_is_no_checkpoint_and_its_target_stays(tmp_path: Path, save) -> None:
    elsewhere = tmp_path / "elsewhere"
    save(9).rename(elsewhere)
    for step in (1, 2, 3):
        save(step)
    link = tmp_path / "checkpoints" / "step-000009"
    link.symlink_to(elsewhere)
    assert checkpoints.newest(tmp_path) == tmp_path / "checkpoints" / "step-000003" and not checkpoints.torn(tmp_path)
    save(9)
    assert (elsewhere / "state.json").is_file() and checkpoints.newest(tmp_path) == link and not link.is_symlink()


def empty_file(checkpoint: Path) -> None:
    (checkpoint / "state.json").write_text("")


def half_a_file(checkpoint: Path) -> None:
    text = (checkpoint / "state.json").read_text()
    (checkpoint / "state.json").write_text(text[: len(text) // 2])


def lost_key(checkpoint: Path) -> None:
    found = json.loads((checkpoint / "state.json").read_text())
    del found["cursor"]
    (checkpoint / "state.json").write_text(json.dumps(found))


def truncated(checkpoint: Path) -> None:
    (checkpoint / "random-0.pt").write_bytes(b"x")


def power_cut(checkpoint: Path) -> None:
    file = checkpoint / "random-0.pt"
    file.write_bytes(bytes(file.stat().st_size))


TORN = {
    "empty state": (empty_file, "its state.json is torn"),
    "half a state": (half_a_file, "its state.json is torn"),
    "a list": (lambda one: (one / "state.json").write_text("[]"), "lists no files"),
    "a lost key": (lost_key, "another version of Tandem: cursor"),
    "a new key": (lambda one: rewrite(one, surprise=1), "another version of Tandem: surprise"),
    "of before files were listed": (lambda one: rewrite(one, files=None), "lists no files"),
    "another step": (lambda one: rewrite(one, step=7), "is of step 7"),
    "no batches": (lambda one: (one / "in-flight-0.pt").unlink(), "in-flight-0.pt is missing"),
    "no weights": (lambda one: (one / "policy" / "mp_rank_00_model_states.pt").unlink(), "policy/mp_rank_00"),
    "half a file": (truncated, "random-0.pt has 1 bytes of"),
    "a power cut": (power_cut, "random-0.pt holds zeros in place of its content"),
}


@pytest.mark.parametrize("tear,fault", TORN.values(), ids=TORN)
def test_a_torn_checkpoint_is_left_out_and_said(tmp_path: Path, save, tear, fault: str) -> None:
    good, bad = save(2), save(4)
    tear(bad)
    assert checkpoints.newest(tmp_path) == good and checkpoints.read(good).step == 2
    (line,) = checkpoints.torn(tmp_path)
    assert line.startswith(f"{bad} is left out: ") and fault in line
    before = sorted(path.name for path in bad.iterdir())
    assert save(4) == bad == checkpoints.newest(tmp_path) and not checkpoints.torn(tmp_path)
    kept = tmp_path / "checkpoints" / "not-a-checkpoint-1-step-000004"
    assert sorted(path.name for path in kept.iterdir()) == before, "what is not whole is not deleted"


def test_the_disk_has_a_checkpoint_before_it_gets_its_name(tmp_path: Path, save, monkeypatch) -> None:
    flushed: list[Path] = []
    monkeypatch.setattr(disk, "flush", lambda *places: flushed.extend(places))
    final = save(2)
    partial = final.with_name("partial-step-000002")
    expected = {partial / path.relative_to(final) for path in final.rglob("*")} | {partial}
    assert set(flushed[:-1]) == expected and flushed[-1] == final.parent


def test_a_run_with_nothing_but_a_torn_checkpoint_is_refused(
    tmp_path: Path, save, capsys: pytest.CaptureFixture[str]
) -> None:
    lost_key(save(2))
    config = cli.parse(QUICK)[0]
    (tmp_path / "config.yaml").write_text(cli.dump_yaml(config))
    assert engine.run.main(["--resume", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "another version of Tandem: cursor" in error, error


def test_a_run_of_the_former_version_is_refused_in_one_line(
    tmp_path: Path, save, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its batches in flight name classes by the places that they had then."""
    checkpoint = save(2)
    torch.save([Batch(2, [], 0, 4, 0.0)], checkpoint / "in-flight-0.pt")
    found = json.loads((checkpoint / "state.json").read_text())
    del found["format"]
    found["files"]["in-flight-0.pt"] = (checkpoint / "in-flight-0.pt").stat().st_size
    (checkpoint / "state.json").write_text(json.dumps(found))
    (tmp_path / "config.yaml").write_text(cli.dump_yaml(cli.parse(QUICK)[0]))
    assert engine.run.main(["--resume", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "was written by another version of Tandem" in error, error


def test_batches_in_flight_come_back_without_their_classes(tmp_path: Path) -> None:
    """On the second of two ranks; the rows of the data set, whatever is in them, are found among the prompts."""
    prompts = [Prompt([i], str(i), {"prompt": str(i), "when": date(2026, 1, 1 + i)}) for i in range(5)]
    config = Config.model_validate({"rollout": {"prompts_per_step": 4}})
    source = Source(config, addition.tokenizer(), prompts, [], rank=1, size=2)
    drawn = Stream(prompts, config.seed)
    drawn.take(7)
    samples = [
        Sample(2 * i, i, prompt.ids, prompt.columns, [3, 1], "stop", np.array([-1.5, -0.1], np.float32), 6)
        for i, prompt in enumerate(drawn.take(4))
        if i >= 2
    ]
    world = World(1, 2, torch.device("cpu"))
    in_flight.write(tmp_path, [Batch(3, samples, 7, 11, 0.5)], world)
    torch.load(tmp_path / "in-flight-1.pt", weights_only=True)
    (batch,) = in_flight.read(tmp_path, world, source)
    assert (batch.step, batch.first, batch.cursor, batch.seconds) == (3, 7, 11, 0.5)
    for found, expected in zip(batch.samples, samples, strict=True):
        assert found.behaviour_logprobs.dtype == np.float32
        assert found.behaviour_logprobs.tolist() == expected.behaviour_logprobs.tolist()
        rest = {"behaviour_logprobs": None, "reward": None}
        assert replace(found, **rest) == replace(expected, **rest) and found.columns["when"] == expected.columns["when"]


def test_only_its_own_partial_folder_is_removed(tmp_path: Path, save) -> None:
    for name in ("partial-step-000002", "partial-step-000007", "partial-mine"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    save(2)
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["partial-mine", "partial-step-000007", "step-000002"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert engine.run.main([*QUICK, *map(str, arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    return error


def test_an_output_dir_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for place in ("/proc/tandem", "/sys", tmp_path / "file", tmp_path / "file" / "below", tmp_path / "link", "x" * 300):
        assert "output_dir: cannot write to" in refused(capsys, "--output_dir", place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_a_refused_run_makes_no_output_dir(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """Also where what is refused comes after the look at the folder."""

    def refuse(_: Config) -> None:
        raise ConfigError("a package is missing")

    monkeypatch.setattr(engine.run, "_check_packages", refuse)
    assert "a package" in refused(capsys, "--output_dir", tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("own", folder.OWN)
def test_another_run_s_folder_is_not_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str], own: str) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / own).write_text("")
    error = refused(capsys, "--output_dir", tmp_path, "--name", "r")
    assert f"name: {tmp_path / 'r'} exists and holds {own}" in error and "give another --name" in error


def test_a_name_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r").write_text("")
    assert "is there and no folder" in refused(capsys, "--output_dir", tmp_path, "--name", "r")


def named(tmp_path: Path, name: str | None = "r") -> Config:
    config = cli.parse([*QUICK, "--output_dir", str(tmp_path / "runs")])[0]
    return config.model_copy(update={"name": name})


def test_a_folder_with_one_s_own_things_is_taken(tmp_path: Path) -> None:
    (tmp_path / "runs" / "r").mkdir(parents=True)
    (tmp_path / "runs" / "r" / "notes.txt").write_text("precious")
    folder.check_new(named(tmp_path))
    run_dir = folder.locate(named(tmp_path), None)
    folder.discard(run_dir)
    assert [path.name for path in run_dir.iterdir()] == ["notes.txt"]


def test_of_two_runs_that_start_at_once_one_takes_the_name(tmp_path: Path) -> None:
    folder.check_new(named(tmp_path))
    folder.locate(named(tmp_path), None)
    with pytest.raises(ConfigError, match="has just been taken by another run"):
        folder.locate(named(tmp_path), None)
    places = {folder.locate(named(tmp_path, None), None) for _ in range(3)}
    assert len(places) == 3


def test_a_run_that_is_refused_takes_its_folders_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when another rank refuses: its word comes as a file."""
    monkeypatch.setattr(signals, "_ending", False)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    world = World(0, 2, torch.device("cpu"))
    config = named(tmp_path).model_copy(update={"live": False})
    for other in (False, True):
        run_dir = folder.locate(config, None)
        with pytest.raises(ConfigError, match=r"^x: no$"), folder.recording(config, world, run_dir):
            if not other:
                raise ConfigError("x: no")
            failures.leave(run_dir, 1, ConfigError("x: no"))
            raise RuntimeError("gloo: connection closed by peer")
        assert not list(tmp_path.iterdir())


def test_a_disk_without_room_gets_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = users.model_folder(tmp_path / "model")
    config = named(tmp_path).model_copy(update={"algo": "grpo"})
    parameters = sum(one.numel() for one in torch.nn.ModuleList([_load(model)]).parameters())
    needed = 3 * parameters * 12 + 2 * parameters * 4
    monkeypatch.setattr(disk, "free_bytes", lambda _: needed)
    assert folder.room_note(config, str(model), tmp_path) is None
    monkeypatch.setattr(disk, "free_bytes", lambda _: needed - 1)
    line = folder.room_note(config, str(model), tmp_path)
    assert line and "\n" not in line and f"{needed / 2**30:.3g} GiB" in line and "3 checkpoints" in line
    often = config.model_copy(update={"save": config.save.model_copy(update={"hf_every_steps": 30})})  # of 100 steps
    line = folder.room_note(often, str(model), tmp_path)
    assert line and "5 exports" in line and f"{(needed + 3 * parameters * 4) / 2**30:.3g} GiB: 3" in line
    ppo = folder.room_note(config.model_copy(update={"algo": "ppo"}), str(model), tmp_path)
    assert ppo and ppo != line, "a value model has checkpoints too"
    (tmp_path / "held").write_bytes(b"x" * 10)
    resumed = config.model_copy(update={"resume": str(tmp_path)})
    assert folder.room_note(resumed, str(model), tmp_path) is None, "what the run has written already counts"


def _load(model: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model)


@pytest.mark.parametrize(
    "error,reason",
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "Disk quota exceeded"),
        (OSError(errno.EROFS, "Read-only file system"), "Read-only file system"),
        (RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed"), "No space left on device"),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"), "No space left on device"),
        (ValueError("Error while serializing: I/O error: x (os error 28)"), "No space left on device"),
        (RuntimeError("expected scalar type Half"), None),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), None),
    ],
)
def test_why_a_write_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda _: 0)
    removed = []
    with pytest.raises(disk.WriteFailed if reason else type(error)) as failed:
        with disk.writing(tmp_path / "model", lambda: removed.append(True)):
            raise error
    assert removed and (reason is None or f"{tmp_path / 'model'} could not be written: {reason}" in str(failed.value))


def test_states_are_read_back(tmp_path: Path, save) -> None:
    assert asdict(checkpoints.read(save(3))) == asdict(checkpoints.OnlineTrainerState(step=3))
    assert os.listdir(tmp_path / "checkpoints") == ["step-000003"]


LINKS = ("checkpoints/partial-step-000002", "checkpoints/step-000002", "partial-model", "model", "best")


@pytest.mark.parametrize("name", LINKS)
def test_nothing_behind_a_link_is_touched(tmp_path: Path, without_pictures: None, name: str) -> None:
    """Where what a run is about to write there is a link to somebody's own files."""
    model, run, own = users.model_folder(tmp_path / "m"), tmp_path / "runs" / "run", tmp_path / "own"
    assert engine.run.main(users.arguments(tmp_path, model, "--train.steps", "1")) == 0
    own.mkdir()
    (own / "thesis.txt").write_text("years of work")
    disk.remove(run / name)
    (run / name).symlink_to(own)
    assert engine.run.main(["--resume", str(run), "--train.steps", "2"]) == 0
    assert (own / "thesis.txt").read_text() == "years of work"
    assert [path.name for path in own.iterdir()] == ["thesis.txt"]
    assert (run / "model" / "config.json").is_file() and not (run / "model").is_symlink()
    assert checkpoints.newest(run) == run / "checkpoints" / "step-000002"


def test_what_is_torn_goes_and_nothing_behind_a_link(tmp_path: Path) -> None:
    kept = tmp_path / "kept.txt"
    kept.write_text("kept")
    torn = tmp_path / "torn"
    (torn / "deep").mkdir(parents=True)
    (torn / "deep" / "weights").write_bytes(b"1" * 100)
    (torn / "link").symlink_to(kept)
    os.link(kept, torn / "second name")
    opened = (torn / "deep" / "weights").open("rb")
    disk.remove(torn)
    assert not torn.exists() and kept.read_text() == "kept"
    assert os.fstat(opened.fileno()).st_size == 0, "its bytes are free though somebody holds it open"
    opened.close()
    torn.symlink_to(tmp_path, target_is_directory=True)
    disk.remove(torn)
    assert not torn.is_symlink() and kept.read_text() == "kept"
