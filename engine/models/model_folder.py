"""A model's folder before its weights load: its configuration, and what its files tell without being read.

What the model computes is looked at later, when it is loaded (``engine.training.behaviour``).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import ConfigError
from engine.config.quoted import words
from engine.models import weight_files

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def check_there(key: str, path: str) -> None:
    """Checks what a path alone tells; of a hub name that is nothing. Imports nothing heavy.

    Raises:
        ConfigError: there is no such folder, or it is no model's; of a run's the line names the model in it.
    """
    folder = Path(path)
    if folder.is_dir():
        if (folder / "config.json").is_file():
            return
        inner = folder / "model"
        hint = f"; that of a run is '{inner}'" if (inner / "config.json").is_file() else ""
        if folder.resolve().parent.name == "checkpoints":
            hint = "; engine.export makes one of a checkpoint"
        raise ConfigError(f"{key}: '{path}' is no model folder, it has no config.json{hint}")
    if folder.exists():
        raise ConfigError(f"{key}: '{path}' is a file, it must be a model's folder")
    if path.startswith((".", "/")):
        raise ConfigError(f"{key}: there is no '{path}'")


def read_config(key: str, path: str) -> PreTrainedConfig:
    """A model's configuration, after everything that its files alone can show to be wrong.

    Args:
        key: the setting that named the model, for messages.
        path: a folder or hub name.

    Raises:
        ConfigError: there is none; the model brings code of its own; its weights are quantised, absent or torn.
    """
    from transformers import AutoConfig

    folder = Path(path)
    check_there(key, path)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # OSError, ValueError, KeyError, …: whatever a file can make transformers say
        said = words(error)
        if "trust_remote_code" in said:
            raise ConfigError(
                f"{key}: '{path}' brings code of its own (auto_map in config.json), and Tandem runs none: take a model "
                "whose kind transformers has built in"
            ) from error
        raise ConfigError(f"{key}: the configuration of '{path}' cannot be read: {said:.200}") from error
    if method := _quantisation(config):
        raise ConfigError(weight_files.quantised(key, path, method))
    if folder.is_dir():
        weight_files.check(key, folder)
    return config


def is_classifier(config: PreTrainedConfig) -> bool:
    """True where the folder says that its weights are a sequence classifier's, such as a reward model's."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def longest_sequence(config: PreTrainedConfig) -> int | None:
    """Positions a model has; None for one without a limit."""
    longest: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return longest


def _quantisation(config: Any) -> str | None:
    for part in (config, config.get_text_config()):
        if settings := getattr(part, "quantization_config", None):
            method = settings.get("quant_method") if isinstance(settings, dict) else None
            return str(method or "quantization_config in config.json")
    return None
