"""Settings about sampled responses in a run that trains on rows, and the other way round: each is refused."""

from __future__ import annotations

from engine.config import Config, ConfigError, cli

SAMPLED_SECTIONS = ("rollout", "generation", "reward", "schedule", "kl", "off_policy")
SAMPLED_KEYS = (
    "memory.sleep", "memory.offload", "memory.zero_copy", "memory.kv_cache_gib", "train.epochs_per_batch",
    "train.minibatches_per_batch", "train.clip_low", "train.clip_high", "eval.samples_per_prompt", "eval.temperature",
)  # fmt: skip
"""What only a run that samples can honour, sections and single keys."""
ROW_KEYS = (
    "train.epochs", "train.rows_per_step", "data.completion_column", "data.messages_column", "data.chosen_column",
    "data.rejected_column", "data.margin_column", "data.loss_on", "data.max_row_tokens", "data.too_long",
)  # fmt: skip
"""What only a run that trains on rows can honour."""


def check(config: Config) -> None:
    """Refuses what was set and would change nothing.

    Raises:
        ConfigError: names the setting.
    """
    name, defaults = config.algorithm.name, dict(cli.flat(Config()))
    if config.trains_on_rows and config.algorithm.rows == "pair" and config.data.loss_on == "assistant":
        raise ConfigError(f"data.loss_on assistant: {name} compares two completions of one prompt: leave it out")
    if config.trains_on_rows and config.trained == "policy" and config.data.margin_column is not None:
        raise ConfigError(f"data.margin_column is a part of a reward model's loss, and {name} has none: leave it out")
    if config.trained == "reward_model" and config.train.entropy_coef:
        raise ConfigError(f"train.entropy_coef is about a policy, and {name} trains none: leave it out")
    for key, value in cli.flat(config):
        if value == defaults.get(key, value):
            continue
        sampled = key.partition(".")[0] in SAMPLED_SECTIONS or key in SAMPLED_KEYS
        if config.trains_on_rows and sampled:
            raise ConfigError(
                f"{key} is about sampled responses, and {name} trains on the rows of a data set: leave it out"
            )
        if not config.trains_on_rows and key in ROW_KEYS:
            raise ConfigError(f"{key} is about training on the rows of a data set, and {name} samples: leave it out")
