"""How a command ends: one line for what cannot work, and the exit status. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from engine.config import ConfigError
from engine.launch import failures, launcher, signals
from engine.machine import disk
from engine.models import hub


def run(work: Callable[[list[str]], None], argv: list[str] | None) -> int:
    """Runs a command; gives its exit status.

    That is 0 when it is done, 2 for arguments that cannot work, 1 where a file cannot be written or uploaded or a judge
    fails, 130 or 143 when stopped by Ctrl-C or SIGTERM.
    """
    launcher.mute_libraries()
    signals.stop_on_sigterm(False)
    try:
        work(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        return failures.refuse(error)
    except (disk.WriteFailed, hub.PushFailed) as error:
        return _fail(error)
    except RuntimeError as error:
        from engine.rewards import RewardError  # imports torch

        if not isinstance(error, RewardError):
            raise
        return _fail(error)
    except KeyboardInterrupt as error:
        print("interrupted", file=sys.stderr)
        return signals.exit_status(error)
    return 0


def _fail(error: Exception) -> int:
    print(f"error: {failures.one_line(str(error))}", file=sys.stderr)
    return 1


def prepare_libraries(device: str) -> None:
    """Sets what libraries read when they are imported, and keeps them from talking about themselves."""
    launcher.tidy_environment(device)
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def new(key: str, path: str | None, what: str) -> Path:
    """The path of an output that is not there yet.

    Raises:
        ConfigError: it is not given, is taken, or cannot be made.
    """
    if not path:
        raise ConfigError(f"--{key} is missing: the {what} to write")
    found = Path(path).expanduser()
    if found.exists() or found.is_symlink():
        raise ConfigError(f"{key}: '{path}' is there already: remove it, or give another name")
    disk.probe(key, found.parent)
    return found


def only_word(words: list[str], usage: str) -> str:
    """The one thing that a command works on; raises ``ConfigError`` for none or several."""
    if len(words) != 1:
        raise ConfigError(f"{len(words) or 'nothing'} to work on, it must be one: {usage}")
    return words[0]
