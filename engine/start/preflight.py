"""What a run reads before any weights load and before it has a folder; a fault in it is one line and leaves nothing.

In this order: the models' configurations, the policy's tokenizer, the prompts, the reward function; or, in the place of
these two, the rows. What only loaded weights can show comes later, in ``engine.start.build.load_models``, and still
before the run has a folder.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from engine import rewards
from engine.config import Config, ConfigError
from engine.data import padding, policy_tokens
from engine.data.prompts import Prompt, load_prompts
from engine.data.stream import Mixed
from engine.data.training_rows import Unit, load_rows
from engine.models import model_folder, weight_files
from engine.rewards import classifier
from engine.run_folder import checkpoints

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Inputs:
    """What was read; the same on every rank."""

    tokenizer: PreTrainedTokenizerBase
    """The policy's."""
    notes: list[str]
    """Lines for the person: what was dropped or is unusual."""
    prompts: list[Prompt] = field(default_factory=list)
    held_out: list[Prompt] = field(default_factory=list)
    sources: rewards.Sources | None = None
    """Of scores."""
    rows: list[Unit] = field(default_factory=list)
    """In the place of these three, for an algorithm that trains on rows."""
    held_out_rows: list[Unit] = field(default_factory=list)

    @property
    def longest_prompt(self) -> int:
        """Tokens."""
        return max(len(prompt.ids) for prompt in [*self.prompts, *self.held_out])

    @property
    def longest_row(self) -> int:
        """Tokens."""
        return max(one.length for unit in [*self.rows, *self.held_out_rows] for one in unit)

    @property
    def has_held_out(self) -> bool:
        """True where there is something to evaluate on."""
        return bool(self.held_out or self.held_out_rows)


def read(config: Config) -> Inputs:
    """Reads and checks a run's inputs. Each rank does; no process group is needed.

    Raises:
        ConfigError: the first fault, in one line.
    """
    models = _model_configs(config)
    tokenizer = policy_tokens.of_run(config)
    if config.trains_on_rows:
        rows, held_out_rows, notes = load_rows(config, tokenizer)
        if config.trained == "reward_model" and (note := padding.give(config, tokenizer)):
            notes.append(note)
        inputs = Inputs(tokenizer, notes, rows=rows, held_out_rows=held_out_rows)
        for key, (path, shape) in models.items():
            _check_row_positions(key, path, shape, inputs.longest_row)
    else:
        prompts, held_out, notes = load_prompts(config, tokenizer)
        sources = rewards.read(config, tokenizer)
        _check_sources(sources, prompts, held_out)
        inputs = Inputs(tokenizer, notes, prompts, held_out, sources)
        for key, (path, shape) in models.items():
            check_positions(config, key, path, shape, inputs.longest_prompt)
    if isinstance(taken := inputs.rows or inputs.prompts, Mixed):
        each = config.train.rows_per_step if config.trains_on_rows else config.rollout.prompts_per_step
        notes.append(taken.line(config.train.steps * each))
    if config.model.path is not None:
        _note_dtype(config, config.model.path, notes)
    return inputs


def with_steps(config: Config, inputs: Inputs) -> Config:
    """The configuration with ``train.steps`` in the place of ``train.epochs``: whole batches of the rows there are.

    Raises:
        ConfigError: a resumed run has made as many already.
    """
    if config.train.epochs is None:
        return config
    steps = max(1, math.ceil(config.train.epochs * len(inputs.rows) / config.train.rows_per_step))
    checkpoint = checkpoints.newest(Path(config.resume)) if config.resume else None
    if checkpoint is not None and checkpoints.read(checkpoint).step >= steps:
        raise ConfigError(
            f"resume: {checkpoint} has all {steps} steps of train.epochs {config.train.epochs}; give more"
        )
    train = config.train.model_copy(update={"steps": steps, "epochs": None})
    return config.model_copy(update={"train": train})


def _model_configs(config: Config) -> dict[str, tuple[str, PreTrainedConfig]]:
    """The configurations of the models that sequences of the policy's tokens go through, by setting."""
    model = config.model
    paths = {
        "model.path": model.path,
        "model.value_path": model.value_path if config.algorithm.value_model else None,
        "model.reference_path": model.reference_path if config.has_reference else None,
    }
    found = {key: (path, model_folder.read_config(key, path)) for key, path in paths.items() if path is not None}
    if "model.path" in found:
        check = _check_scoring if config.trained == "reward_model" else check_causal
        check("model.path", *found["model.path"])
    if "model.value_path" in found:
        _check_scoring("model.value_path", *found["model.value_path"])
    if "model.reference_path" in found:
        check_causal("model.reference_path", *found["model.reference_path"])
    return found


def _check_scoring(key: str, path: str, shape: PreTrainedConfig) -> None:
    """Raises ConfigError for a model that neither gives one score nor is a language model that can come to do so."""
    if model_folder.is_classifier(shape):
        classifier.check_head(path, f"{key}: '{path}'", shape)
    else:
        check_causal(key, path, shape)
        classifier.check_kind(f"{key}: '{path}'", shape)


def check_causal(key: str, path: str, shape: PreTrainedConfig) -> None:
    """Raises ConfigError for a model that is no causal language model; ``key`` is the setting that named it."""
    from transformers import AutoModelForCausalLM

    if model_folder.is_classifier(shape):
        raise ConfigError(f"{key}: '{path}' ({shape.model_type}) is a reward model: it writes nothing")
    if type(shape) not in AutoModelForCausalLM._model_mapping or getattr(shape, "is_encoder_decoder", False):
        raise ConfigError(
            f"{key}: '{path}' ({shape.model_type}) is no causal language model, the only kind that can be a policy"
        )


def check_positions(config: Config, key: str, path: str, shape: PreTrainedConfig, longest_prompt: int) -> None:
    """Raises ConfigError for a model that is too short for the longest prompt, in tokens, and a response to it."""
    positions = model_folder.longest_sequence(shape)
    # vLLM needs a place for one more token where it is asked for log-probabilities.
    spare = 1 if config.generation.backend == "vllm" and key == "model.path" else 0
    response = config.rollout.max_response_tokens + spare
    if positions is not None and longest_prompt + response > positions:
        shorter = " or rollout.max_prompt_tokens" if response < positions else ""  # else no prompt has room
        raise ConfigError(
            f"{key}: '{path}' has {positions} positions, fewer than the longest prompt ({longest_prompt} tokens) and "
            f"rollout.max_response_tokens ({config.rollout.max_response_tokens}) take{' in vLLM' if spare else ''}: "
            f"lower rollout.max_response_tokens{shorter}"
        )


def _check_row_positions(key: str, path: str, shape: PreTrainedConfig, longest: int) -> None:
    positions = model_folder.longest_sequence(shape)
    if positions is not None and longest > positions:
        raise ConfigError(
            f"{key}: '{path}' has {positions} positions, fewer than the longest row takes ({longest} tokens): lower "
            "data.max_row_tokens"
        )


def _check_sources(sources: rewards.Sources, prompts: list[Prompt], held_out: list[Prompt]) -> None:
    """Each source of a mixture has to have the columns that a reward function asks for by their names."""
    sources.check([*prompts, *held_out])
    for part in prompts.parts if isinstance(prompts, Mixed) else []:
        try:
            sources.check(part.items)
        except ConfigError as error:
            raise ConfigError(f"the rows of {part.name}: {error}") from error


def _note_dtype(config: Config, path: str, notes: list[str]) -> None:
    stored = weight_files.dtype(path)
    if stored not in (None, config.model.dtype):
        notes.append(
            f"model.path holds {stored} weights and model.dtype is {config.model.dtype}: the run computes in, and "
            f"model/ and best/ will be written in, {config.model.dtype}"
        )
