"""The policy as a Hugging Face folder. All but its weights is tried at start, so that it cannot fail at the end."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import GenerationConfig
from transformers.utils import cached_file

from engine.config import ConfigError
from engine.config.quoted import kind_and_words
from engine.machine import disk
from engine.machine.world import World
from engine.training import lora, weights

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

GENERATION_CONFIG = "generation_config.json"


def export(
    engine: DeepSpeedEngine, tokenizer: PreTrainedTokenizerBase, source: str, folder: Path, world: World
) -> None:
    """Writes ``engine.module.model`` and its tokenizer to ``folder``, in place of an older one. Collective.

    LoRA's adapters are merged, and saved apart too, in the folder ``adapter``.

    Args:
        source: folder or hub name that the model started from; its generation_config.json is handed on as it is.

    Raises:
        disk.WriteFailed: it cannot be written, and what there was of it is removed.
    """
    model = engine.module.model
    state = {name: tensor.clone().cpu() for name, tensor in weights.full_weights(engine) if world.main}
    factors = {name: tensor.clone().cpu() for name, tensor in weights.lora_factors(engine) if world.main}
    if world.main:
        with replacing(folder) as partial:
            write(model, tokenizer, source, partial, state)
            if factors:
                lora.save(model, factors, partial / "adapter")


@contextmanager
def replacing(folder: Path, then: str = disk.RESUME) -> Iterator[Path]:
    """A folder to write that takes the place of ``folder``, and of what was there, when it is whole.

    Args:
        then: what to do when there is room again, for the message.

    Raises:
        disk.WriteFailed: it cannot be written, and what there was of it is removed.
    """
    partial = folder.with_name(f"partial-{folder.name}")
    disk.clear(partial)  # of a process that was killed while exporting
    with disk.writing(folder, lambda: disk.remove(partial), then):
        folder.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        disk.clear(folder)
        partial.rename(folder)


def trial(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str, name: str) -> None:
    """Writes all but the weights to a folder of its own and removes it.

    Args:
        name: the setting and the model, for messages.

    Raises:
        ConfigError: transformers refuses to save some of it.
    """
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        try:
            write(model, tokenizer, source, Path(folder), {})
        except Exception as error:
            raise ConfigError(
                f"{name} could be trained but not saved, because transformers refuses to write its files: "
                f"{kind_and_words(error, longest=200)}"
            ) from error


def write(
    model: Any, tokenizer: PreTrainedTokenizerBase, source: str, folder: Path, state: Mapping[str, Tensor]
) -> None:
    """Writes a model with these weights, its generation settings and its tokenizer."""
    settings = cached_file(source, GENERATION_CONFIG, _raise_exceptions_for_missing_entries=False)
    with _saved_apart(model, bool(settings) and model.can_generate()):
        model.save_pretrained(folder, state_dict=state)
    if settings:
        shutil.copyfile(settings, folder / GENERATION_CONFIG)
    tokenizer.save_pretrained(folder)


@contextmanager
def _saved_apart(model: Any, apart: bool) -> Iterator[None]:
    """Keeps transformers from checking a model's generation settings: it loads some that it refuses to save."""
    if not apart:
        yield
        return
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own
