"""A run's folder: its place, its resolved configuration, and what rank 0 records in it."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from engine import cli, deadline, failures, launch, state
from engine.config import Config, ConfigError
from engine.distributed import World
from engine.report import records
from engine.report.recorder import Recorder


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
    launch.tell_folder(run_dir)
    if not config.resume:
        write_config(config, run_dir)
    checkpoint = state.newest(run_dir) if config.resume else None
    recorder = Recorder(
        run_dir,
        header={
            "algo": config.algo,
            "model": config.model.path or f"starting checkpoint of '{config.data.task}'",
            "data": config.data.task or config.data.path,
            "seed": config.seed,
            "backend": config.generation.backend,
            "world_size": world.size,
            "device": str(world.device),
        },
        total_steps=config.train.steps,
        start_step=state.read(checkpoint).step if checkpoint else 0,
        live=config.live,
    )
    try:
        with deadline.last_words(lambda error: recorder.close(error=error)):
            yield recorder
    except ConfigError:
        recorder.discard()
        if not config.resume:
            shutil.rmtree(run_dir)
        raise
    except BaseException as error:
        cause = failures.cause(run_dir, error)
        recorder.close(error=cause)
        if cause is not error:
            raise cause from error
        raise


def write_config(config: Config, run_dir: Path) -> None:
    """The resolved configuration, which ``--resume`` starts from; the run's own name and place in it."""
    resolved = config.model_copy(update={"name": run_dir.name, "output_dir": str(run_dir.parent), "resume": None})
    records.write_atomically(run_dir / "config.yaml", cli.dump_yaml(resolved))


def locate(config: Config, config_file: str | None) -> Path:
    """The run's folder, made if it is a new run, and without an earlier start's errors; a default name that is taken
    gets a number."""
    if config.resume or config.name is not None:
        folder = Path(config.resume or Path(config.output_dir) / str(config.name))
        folder.mkdir(parents=True, exist_ok=True)
        failures.clear(folder)
        return folder
    stem = Path(config_file).stem if config_file else config.data.task or Path(config.data.path or "data").stem
    name = f"{config.algo}-{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        folder = Path(config.output_dir) / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
    return folder
