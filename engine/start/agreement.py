"""What the nodes of a run must have alike: versions, settings, the run's folder, the rows of its data.

Each comparison gives the same answer on every rank, so that a run that cannot be ends on all nodes with the same line.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import algorithms
import engine
import kernels
from engine.config import Config, ConfigError, cli, user_algorithm
from engine.machine import disk
from engine.machine.meeting import Meeting, Said
from engine.run_folder.summary import versions

if TYPE_CHECKING:
    from engine.start.preflight import Inputs

OF_A_NODE = {"launch.ranks", "live"}
"""Settings that may differ between nodes."""
SHARED_WITHIN = 5.0
"""Seconds that a network file system has to show a new file on another node."""


def on_settings(config: Config, meeting: Meeting) -> None:
    """Compares versions and settings, and looks for the run's folder on every node. Collective; before inputs are read.

    Raises:
        ConfigError: the first difference, or a node that does not see the folder.
    """
    if not meeting.open:
        return
    minutes = config.launch.timeout_minutes
    code = versions() | {"Tandem's code": _code()}
    settings = {key: str(value) for key, value in cli.flat(config) if key not in OF_A_NODE} | _own_files(config)
    said = meeting.gather("settings", {"versions": code, "settings": settings}, minutes)
    _same(said, "versions", "not installed", "every node needs the same versions")
    _same(said, "settings", "not a setting", "give every node the same configuration")
    _shared(config, meeting, minutes)


def on_inputs(config: Config, inputs: Inputs, meeting: Meeting) -> None:
    """Compares how many prompts or rows each rank has read. Collective; the meeting's last agreement.

    Raises:
        ConfigError: they differ.
    """
    if not meeting.open:
        return
    counts = {
        "the number of prompts or rows": str(len(inputs.prompts or inputs.rows)),
        "the number of held-out prompts or rows": str(len(inputs.held_out or inputs.held_out_rows)),
        "the size of the vocabulary": str(len(inputs.tokenizer)),
    }
    said = meeting.gather("inputs", {"inputs": counts}, config.launch.timeout_minutes)
    _same(said, "inputs", "unknown", "every node needs the same files")
    meeting.close()


def _same(said: list[Said], kind: str, absent: str, remedy: str) -> None:
    """Raises ConfigError for the first fact of a kind that a rank has unlike rank 0."""
    first = said[0]
    for other in said[1:]:
        ours: Mapping[str, str] = first.value[kind]
        theirs: Mapping[str, str] = other.value[kind]
        for name in {**ours, **theirs}:
            here, there = ours.get(name, absent), theirs.get(name, absent)
            if here != there:
                raise ConfigError(f"{name} is {here} for {first.who}, but {there} for {other.who}: {remedy}")


def _shared(config: Config, meeting: Meeting, minutes: float) -> None:
    """Raises ConfigError unless every rank sees, by rank 0's name for it, a file that rank 0 makes for the moment.

    Folders of one name do not tell: on a node's own disk a rank's part of a checkpoint would lie where nobody looks.
    """
    key, folder = ("resume", config.resume) if config.resume else ("output_dir", config.output_dir)
    with contextlib.ExitStack() as stack:
        trial = None
        if os.environ["RANK"] == "0":
            trial = str(stack.enter_context(disk.trial_file(key, Path(str(folder)))))
        trial = meeting.gather("trial", trial, minutes)[0].value
        seen = meeting.gather("seen", _appears(Path(trial)), minutes)
    blind = [rank.who for rank in seen if not rank.value]
    if blind:
        raise ConfigError(
            f"{key}: {blind[0]} does not see what {seen[0].who} writes to {folder}: it must be one folder of a file "
            "system that all nodes share, named by the same absolute path"
        )


def _appears(file: Path) -> bool:
    """Whether a file is seen here, at once or soon."""
    deadline = time.monotonic() + SHARED_WITHIN
    while not (seen := file.exists()) and time.monotonic() < deadline:
        for place in reversed(file.parents):  # a client of NFS asks the server anew for a folder that is opened
            with contextlib.suppress(OSError):
                os.scandir(place).close()
        time.sleep(0.1)
    return seen


def _own_files(config: Config) -> dict[str, str]:
    """Digests of the user's files that settings name."""
    function = (config.reward.function or "").rpartition(":")[0]
    files = {
        "algo": user_algorithm.file_of(config),
        "data.chat_template": config.data.chat_template if isinstance(config.data.chat_template, str) else None,
        "reward.function": function if function.endswith(".py") else None,
    }
    return {f"{key}'s file": _digest(Path(file).read_bytes()) for key, file in files.items() if file is not None}


def _code() -> str:
    """A digest of the Python files of Tandem's packages, in a checkout or installed: of one version there are many."""
    content = b""
    for package in (algorithms, engine, kernels):
        top = Path(package.__path__[0])
        for file in sorted(top.rglob("*.py")):
            content += f"{top.name}/{file.relative_to(top)}".encode() + b"\0" + file.read_bytes() + b"\0"
    return _digest(content)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
