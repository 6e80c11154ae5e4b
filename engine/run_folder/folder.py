"""A run's folder: its place, its resolved configuration, and what rank 0 records in it."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import Config, ConfigError, cli, template_file, user_algorithm
from engine.launch import failures, launcher
from engine.machine import deadline, disk
from engine.memory import model_shape, training_bytes
from engine.models import hub
from engine.report import records
from engine.report.recorder import Recorder
from engine.run_folder import checkpoints

if TYPE_CHECKING:
    from engine.machine.world import World

MODELS = "models"
"""The folder of the models that a run writes while it trains (``save.hf_every_steps``)."""
OWN = (
    records.CONFIG, records.METRICS, records.SAMPLES, records.SUMMARY, records.CRASH, records.REPORT,
    records.TENSORBOARD, user_algorithm.COPY, template_file.COPY, "checkpoints", "model", "best", "partial-model",
    "partial-best", MODELS, records.TRACKERS, "wandb",
)  # fmt: skip
"""What a run makes in its folder; anything else there is somebody's own."""

_made: list[Path] = []  # the folders that this process made for its run


@contextlib.contextmanager
def recording(config: Config, world: World, run_dir: Path) -> Iterator[Recorder | None]:
    """Rank 0's recorder, closed with the run's error if there was one; the others have none and leave it theirs."""
    if not world.main:
        try:
            with deadline.last_words(lambda error: failures.leave(run_dir, world.rank, error)):
                yield None
        except Exception as error:
            failures.leave(run_dir, world.rank, error)
            raise
        return
    launcher.tell_folder(run_dir)
    if not config.resume:
        with disk.writing(run_dir / user_algorithm.COPY):
            user_algorithm.keep(config, run_dir)
        with disk.writing(run_dir / template_file.COPY):
            template_file.keep(config, run_dir)
        write_config(config, run_dir)
    checkpoint = checkpoints.newest(run_dir) if config.resume else None
    recorder = Recorder(
        run_dir,
        header={
            "algo": config.algorithm.name,
            "model": config.model.path or f"starting checkpoint of '{config.data.task}'",
            "data": config.data.label,
            "seed": config.seed,
            "backend": None if config.trains_on_rows else config.generation.backend,
            "world_size": world.size,
            "device": str(world.device),
        },
        total_steps=config.train.steps,
        start_step=checkpoints.read(checkpoint).step if checkpoint else 0,
        live=config.live,
        projects=config.report.projects,
        settings=config.model_dump(mode="json"),
    )
    try:
        with deadline.last_words(lambda error: recorder.close(error=error)):
            yield recorder
    except BaseException as error:
        cause = failures.cause(run_dir, error)
        if isinstance(cause, ConfigError):
            recorder.discard()
            if not config.resume:
                discard(run_dir)
        else:
            recorder.close(error=cause)
        if cause is not error:
            raise cause from error
        raise
    if config.push.hub_id is not None:
        model = run_dir / "model"
        try:
            recorder.say_last(f"{model} is on the hub: {hub.push(model, config.push.hub_id, config.push.private)}")
        except hub.PushFailed as error:
            recorder.say_last(str(error))


def write_config(config: Config, run_dir: Path) -> None:
    """The resolved configuration, which ``--resume`` starts from; the run's own name and place in it."""
    place = {"name": run_dir.name, "output_dir": str(run_dir.parent), "resume": None}
    template = template_file.in_folder(config.data.chat_template, run_dir)
    copies = {
        "algo": user_algorithm.in_folder(config.algo, run_dir),
        "data": config.data.model_copy(update={"chat_template": template}),
    }
    resolved = config.model_copy(update=place | copies)
    with disk.writing(run_dir / records.CONFIG):
        records.write_atomically(run_dir / records.CONFIG, cli.dump_yaml(resolved))


def check_new(config: Config) -> None:
    """A new run needs a folder of its own, and the right to make it; makes none.

    Raises:
        ConfigError: there is a run of that name already, or nothing can be written there.
    """
    output = Path(config.output_dir)
    if config.name is not None:
        _check_name(output / config.name)
    if os.environ.get("RANK", "0") == "0":  # each rank would take away what the others have made for the moment
        disk.probe("output_dir", output)


def _check_name(folder: Path) -> None:
    if os.path.lexists(folder) and not folder.is_dir():
        raise ConfigError(f"name: {folder} is there and no folder: give another --name")
    taken = [name for name in OWN if os.path.lexists(folder / name)]
    if not taken:
        return
    if checkpoints.newest(folder) is not None:
        raise ConfigError(f"name: {folder} exists; go on with --resume {folder}, or give another --name")
    raise ConfigError(
        f"name: {folder} exists and holds {taken[0]}, but no checkpoint to go on from: remove it, or give "
        "another --name"
    )


def take(config: Config, config_file: str | None, world: World) -> Path:
    """``locate`` on rank 0, for all: the folder, or on every rank the reason why there is none. Collective."""
    found: str | ConfigError = ""
    if world.main:
        try:
            found = str(locate(config, config_file))
        except ConfigError as error:
            found = error
        except OSError as error:
            found = ConfigError(f"output_dir: cannot make the run's folder: {error}")
    found = world.broadcast(found)
    if isinstance(found, ConfigError):
        raise found
    return Path(found)


def locate(config: Config, config_file: str | None) -> Path:
    """The run's folder, made if it is a new run, and without an earlier start's errors; a default name that is taken
    gets a number.

    Raises:
        ConfigError: another run has taken the name since ``check_new`` looked.
    """
    _made.clear()
    if config.resume:
        failures.clear(Path(config.resume))
        return Path(config.resume)
    if config.name is not None:
        folder = Path(config.output_dir) / config.name
        _make(folder)
        try:
            (folder / records.CONFIG).open("x").close()  # of two that start at once one makes it
        except FileExistsError:
            raise ConfigError(f"name: {folder} has just been taken by another run: give another --name") from None
        failures.clear(folder)
        return folder
    stem = Path(config_file).stem if config_file else config.data.task or Path(config.data.path or "mixture").stem
    name = f"{config.algorithm.name}-{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        folder = Path(config.output_dir) / (name if number == 1 else f"{name}-{number}")
        if _make(folder):
            break
    return folder


def _make(folder: Path) -> bool:
    """Makes a folder and its parents, and remembers which; False if it was there."""
    new = False
    for one in reversed([folder, *folder.parents]):
        with contextlib.suppress(FileExistsError):
            if not one.is_dir():
                one.mkdir()
                _made.append(one)
                new = one == folder
    return new


def discard(run_dir: Path) -> None:
    """Takes a run's own files out of its folder, and the folders that it made, as far as nothing else is in them."""
    for name in OWN:
        path = run_dir / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    failures.clear(run_dir)
    for folder in reversed(_made):
        with contextlib.suppress(OSError):
            folder.rmdir()
    _made.clear()


def room_note(config: Config, model: str, run_dir: Path) -> str | None:
    """One line if the disk of ``run_dir`` has no room for what the run will write there, else None.

    That is ``save.keep`` + 2 checkpoints (one is being written while the others stand), two exports and those of
    ``save.hf_every_steps``; what a resumed run's folder holds already counts as room. A checkpoint has a trained
    model's weights and 12 bytes a parameter of fp32 weights and AdamW's moments (8 for an fp32 model without ZeRO,
    whose weights are the fp32 ones).

    Args:
        model: the policy's folder or hub name.
    """
    try:
        policy = model_shape.read("model.path", model)
        value = model_shape.read("model.value_path", config.model.value_path) if config.model.value_path else policy
    except ConfigError:  # a kind of model whose sizes are not to be had without loading it
        return None
    item = training_bytes.item_bytes(config)
    states = 8 if item == 4 and config.train.zero_stage == 0 else 12
    adapters = policy.adapters(config.lora.rank) if config.lora.rank else 0
    whole = policy.value if config.trained == "reward_model" else policy.policy
    trained = (adapters or whole) + (value.value if config.algorithm.value_model else 0)
    checkpoint, export = trained * (item + states), whole * item
    count, every = config.save.keep + 2, config.save.hf_every_steps
    exports = 2 + (config.train.steps // every if every else 0)
    needed = count * checkpoint + exports * export
    free = disk.free_bytes(run_dir) + (disk.used_bytes(run_dir) if config.resume else 0)
    if free >= needed:
        return None
    gib = disk.GIB
    return (
        f"The disk of {run_dir} has {free / gib:.3g} GiB free, and the run may need {needed / gib:.3g} GiB: {count} "
        f"checkpoints of {checkpoint / gib:.3g} (save.keep + 2) and {exports} exports of {export / gib:.3g}; it goes "
        "on, and ends if the disk is full: make room, or lower save.keep"
        f"{' or raise save.hf_every_steps' if every else ''}"
    )
