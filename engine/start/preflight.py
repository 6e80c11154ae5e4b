"""What a run reads before any weights load and before it has a folder; a fault in it is one line and leaves nothing.

In this order: the models' configurations, the policy's tokenizer, the prompts, the reward function. What only loaded
weights can show comes later, in ``engine.start.build.load_models``, and still before the run has a folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine import rewards
from engine.config import Config, ConfigError
from engine.data.prompts import Prompt, load_prompts, load_tokenizer
from engine.models import model_folder, weight_files

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Inputs:
    """What was read; the same on every rank."""

    tokenizer: PreTrainedTokenizerBase
    """The policy's."""
    prompts: list[Prompt]
    held_out: list[Prompt]
    sources: rewards.Sources
    """Of scores."""
    notes: list[str]
    """Lines for the person: what was dropped or is unusual."""

    @property
    def longest_prompt(self) -> int:
        """Tokens."""
        return max(len(prompt.ids) for prompt in [*self.prompts, *self.held_out])


def read(config: Config) -> Inputs:
    """Reads and checks a run's inputs. Each rank does; no process group is needed.

    Raises:
        ConfigError: the first fault, in one line.
    """
    models = _model_configs(config)
    if config.model.path is None:
        from engine.tasks import addition

        tokenizer = addition.tokenizer()
    else:
        tokenizer = load_tokenizer(config.model.path)
    prompts, held_out, notes = load_prompts(config, tokenizer)
    sources = rewards.read(config, tokenizer)
    sources.check([*prompts, *held_out])
    inputs = Inputs(tokenizer, prompts, held_out, sources, notes)
    for key, (path, shape) in models.items():
        check_positions(config, key, path, shape, inputs.longest_prompt)
    if config.model.path is not None:
        _note_dtype(config, config.model.path, notes)
    return inputs


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
        check_causal("model.path", *found["model.path"])
    if "model.reference_path" in found:
        check_causal("model.reference_path", *found["model.reference_path"])
    return found


def check_causal(key: str, path: str, shape: PreTrainedConfig) -> None:
    """Raises ConfigError for a model that is no causal language model; ``key`` is the setting that named it."""
    from transformers import AutoModelForCausalLM

    if type(shape) not in AutoModelForCausalLM._model_mapping or getattr(shape, "is_encoder_decoder", False):
        raise ConfigError(
            f"{key}: '{path}' ({shape.model_type}) is no causal language model, the only kind that can be a policy"
        )


def check_positions(config: Config, key: str, path: str, shape: PreTrainedConfig, longest_prompt: int) -> None:
    """Raises ConfigError for a model that is too short for the longest prompt, in tokens, and a response to it."""
    positions = model_folder.longest_sequence(shape)
    # vLLM needs a place for one more token where it is asked for log-probabilities.
    spare = 1 if config.generation.backend == "vllm" and key == "model.path" else 0
    longest = longest_prompt + config.rollout.max_response_tokens + spare
    if positions is not None and longest > positions:
        raise ConfigError(
            f"{key}: '{path}' has {positions} positions, fewer than the longest prompt ({longest_prompt} tokens) and "
            f"rollout.max_response_tokens ({config.rollout.max_response_tokens}) take{' in vLLM' if spare else ''}: "
            "lower rollout.max_response_tokens or rollout.max_prompt_tokens"
        )


def _note_dtype(config: Config, path: str, notes: list[str]) -> None:
    stored = weight_files.dtype(path)
    if stored not in (None, config.model.dtype):
        notes.append(
            f"model.path holds {stored} weights and model.dtype is {config.model.dtype}: the run computes in, and "
            f"model/ and best/ will be written in, {config.model.dtype}"
        )
