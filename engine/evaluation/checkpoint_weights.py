"""The trained model's weights out of a checkpoint, whatever ZeRO stage and number of ranks wrote it."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from engine.config import ConfigError

WEIGHTS = "mp_rank_00_model_states.pt"
"""DeepSpeed's file of a whole module, which is there under ZeRO 0 to 2."""


def read(checkpoint: Path, name: str) -> dict[str, Tensor]:
    """Every trained parameter of a model by its name in the module, whole.

    Under ZeRO 0 to 2 these are the module's own, in its own numbers. Under ZeRO-3 they are the optimizer's fp32
    weights, which DeepSpeed's own reader joins from the ranks' parts; rounded they are the module's.

    Args:
        name: of the model in the checkpoint: ``policy`` or ``reward_model``.

    Raises:
        ConfigError: they cannot be read.
    """
    folder = checkpoint / name
    try:
        if (folder / WEIGHTS).is_file():
            found = torch.load(folder / WEIGHTS, map_location="cpu", weights_only=False, mmap=True)["module"]
            return {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), _quiet():
            joined: dict[str, Tensor] = get_fp32_state_dict_from_zero_checkpoint(
                str(checkpoint), tag=name, exclude_frozen_parameters=True
            )
        return joined
    except Exception as error:  # whatever a torn or foreign file makes torch and DeepSpeed say
        said = " ".join(str(error).split())
        raise ConfigError(f"{checkpoint}: its weights cannot be read: {type(error).__name__}: {said:.200}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without DeepSpeed's notes on its progress."""
    logger = logging.getLogger("DeepSpeed")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@torch.no_grad()
def load(module: nn.Module, trained: dict[str, Tensor], checkpoint: Path) -> None:
    """Copies what ``read`` gave into the module that it was read for, rounded to the module's numbers.

    Raises:
        ConfigError: a trained parameter is missing, or has another shape: it is a checkpoint of another model.
    """
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if name not in trained:
            raise ConfigError(f"{checkpoint} is of another model: it has no {name}")
        if trained[name].shape != parameter.shape:
            raise ConfigError(
                f"{checkpoint} is of another model: {name} has the shape {list(trained[name].shape)} there and "
                f"{list(parameter.shape)} in the model that the run began with"
            )
        parameter.copy_(trained[name])
