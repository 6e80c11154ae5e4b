"""A chat template that ``data.chat_template`` names by its file: its text, and the copy in a run's folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from engine.config import Config, ConfigError, Data

COPY = "chat_template.jinja"


def text(data: Data) -> str | None:
    """What the file holds; None where the setting names none.

    Raises:
        ConfigError: it cannot be read, or is empty.
    """
    if not isinstance(data.chat_template, str):
        return None
    name = f"data.chat_template: '{data.chat_template}'"
    try:
        found = Path(data.chat_template).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{name} cannot be read: {reason}") from None
    if not found.strip():
        raise ConfigError(f"{name} is empty")
    return found


def keep(config: Config, run_dir: Path) -> None:
    """Copies the file, if there is one, into the folder of a new run."""
    if isinstance(config.data.chat_template, str):
        shutil.copyfile(config.data.chat_template, run_dir / COPY)


def in_folder(setting: Any, run_dir: Path) -> Any:
    """The value of ``data.chat_template`` by which a run's folder names its copy; any but a file's as it is."""
    named = isinstance(setting, str) and setting.endswith(".jinja")
    return str(run_dir / COPY) if named else setting
