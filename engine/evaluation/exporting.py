"""A checkpoint of a run as a Hugging Face folder: the weights that the run's own ``model/`` has at that step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from engine.config import Config, ConfigError, cli
from engine.data import padding, policy_tokens
from engine.evaluation import card, checkpoint_weights
from engine.evaluation.places import Place
from engine.machine.world import joined
from engine.run_folder import checkpoints
from engine.start import bootstrap, build, prepared
from engine.training import export, lora, weights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def write(
    place: Place,
    folder: Path,
    *,
    dtype: str | None = None,
    form: Literal["merged", "adapter"] = "merged",
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Writes the policy, or reward model, of a checkpoint to ``folder``, with its tokenizer and a model card.

    Args:
        place: a checkpoint.
        dtype: numbers of the weights. Default: the run's.
        form: of a run with adapters, whether these are merged into the model or written by themselves.

    Raises:
        ConfigError: the model that the run began with is gone or another one, or the checkpoint is of another model.
        disk.WriteFailed: it cannot be written, and what there was of it is removed.
    """
    assert place.run_dir is not None
    config, checkpoint = cli.load_run(place.run_dir), Path(place.path)
    source, tokenizer = base(config, say)
    if config.trained == "reward_model":
        padding.give(config, tokenizer)
    model = build.load_trained(config, source, tokenizer.pad_token_id)
    before = checkpoints.read(checkpoint).base_models.get("model.path")
    if before not in (None, build.base_digest(model.model)):
        raise ConfigError(
            f"'{source}' holds other weights, or another configuration, than when {place.run_dir} began: put the first "
            "ones back"
        )
    if config.lora.rank:
        lora.add_adapters(model.model, config.lora, config.seed)
    checkpoint_weights.load(model, checkpoint_weights.read(checkpoint, config.trained), checkpoint)
    numbers = getattr(torch, dtype or config.model.dtype)
    with export.replacing(folder, then="start again") as partial:
        if form == "adapter":
            factors = {name: tensor.to(numbers) for name, tensor in weights.module_factors(model.model)}
            lora.save(model.model, factors, partial)
            tokenizer.save_pretrained(partial)
        else:
            state = {name: tensor.to(numbers) for name, tensor in weights.module_weights(model)}
            export.write(model.model.to(numbers), tokenizer, source, partial, state)
        (partial / "README.md").write_text(card.text(place, config, source, form), encoding="utf-8")


def base(config: Config, say: Callable[[str], None]) -> tuple[str, PreTrainedTokenizerBase]:
    """The folder or hub name of the model that a run began with, and its tokenizer."""
    tokenizer = policy_tokens.of_run(config)
    if config.model.path is not None:
        return prepared.copied(config, say) if config.data.changes_tokenizer else config.model.path, tokenizer
    with joined("cpu", config.launch.timeout_minutes) as world:
        return bootstrap.starting_policy(config, world, say), tokenizer
