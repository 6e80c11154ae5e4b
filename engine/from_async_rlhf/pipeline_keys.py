"""Keys of async_rlhf's scripts around its training on samples, and what each is here.

Theirs are the fields of the scripts' own arguments, of SFTConfig, RewardConfig and ModelConfig of TRL 0.9.4, and of
transformers' TrainingArguments those that its configurations use.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.from_async_rlhf import keys


@dataclass(frozen=True)
class Table:
    """A script's keys."""

    command: str
    """The module here that does what the script does."""
    renamed: dict[str, str]
    """Those that mean the same under another name."""
    derived: dict[str, str]
    """Those that others take part in, in words."""
    left_out: dict[str, str]
    """Those without a counterpart, and why."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Their own, where what they do depends on them and Tandem's are others."""

    @property
    def known(self) -> set[str]:
        """All keys."""
        return {*self.renamed, *self.derived, *self.left_out}


_RENAMED = {
    "model_name_or_path": "model.path",
    "dataset_name": "data.path",
    "dataset_train_split": "data.split",
    "dataset_eval_split": "data.eval_split",
    "learning_rate": "train.learning_rate",
    "weight_decay": "train.weight_decay",
    "adam_epsilon": "train.adam_eps",
    "gradient_checkpointing": "model.gradient_checkpointing",
    "seed": "seed",
}
_DERIVED = {
    "num_train_epochs": "train.epochs, unless max_steps is above 0",
    "max_steps": "train.steps, if above 0",
    "per_device_train_batch_size": "train.rows_per_step: times accumulation and training processes; a pass is filled "
    "by train.tokens_per_microbatch",
    "gradient_accumulation_steps": "train.rows_per_step, as above",
    "warmup_steps": "train.warmup_steps; nothing with lr_scheduler_type constant",
    "eval_strategy": "eval.every_steps: 0 unless steps",
    "evaluation_strategy": "eval.every_steps: 0 unless steps",
    "eval_steps": "eval.every_steps; a share of the run where max_steps says how long that is",
    "save_strategy": "save.every_steps: 0 unless steps",
    "save_steps": "save.every_steps; a share of the run where max_steps says how long that is",
    "max_grad_norm": "train.max_grad_norm, where the launcher's file has none",
    **{
        key: keys.DERIVED[key]
        for key in ("bf16", "fp16", "lr_scheduler_type", "output_dir", "output_global_parent_dir", "adam_beta1")
        + ("report_to", "push_to_hub", "hub_model_id")
        + ("adam_beta2", "use_peft", "lora_r", "lora_alpha", "lora_target_modules", "env")
    },
}
_LEFT_OUT = {
    "tokenizer_name": "the tokenizer of the model counts",
    **{
        key: keys.LEFT_OUT[key]
        for key in ("wandb_run_id", "run_name", "logging_steps")
        + ("hub_strategy", "sanity_check", "ddp_find_unused_parameters", "deepspeed", "config", "dataset_num_proc")
        + ("lora_dropout", "lora_modules_to_save", "lora_task_type")
    },
    "per_device_eval_batch_size": "eval.prompts counts held-out rows; sequences are packed by "
    "train.tokens_per_microbatch",
    **dict.fromkeys(
        ["model_revision", "trust_remote_code", "attn_implementation"], "the newest files, no code of theirs"
    ),
    **dict.fromkeys(
        ["load_in_8bit", "load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant"], "no model is quantised"
    ),
}
_DEFAULTS = {
    "dataset_train_split": "train",
    "dataset_eval_split": "test",
    "num_train_epochs": 3,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "max_grad_norm": 1.0,
    "eval_steps": 500,
    "save_strategy": "steps",
    "save_steps": 500,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "seed": 42,
    "lora_r": 16,
    "lora_alpha": 32,
}

_JUDGE_LEFT_OUT = {
    "batch_size": "a reward model's passes are filled by tokens",
    "wandb_run_id": "figures are in evaluation.json",
    "sanity_check": "give --limit",
    "config": "its values are here",
    "env": "set it for the command",
}
_GENERATE_RENAMED = {
    "dataset_name": "data.path",
    "split": "data.split",
    "temperature": "generation.temperature",
    "top_p": "generation.top_p",
    "max_new_tokens": "rollout.max_response_tokens",
}
_GENERATE_LEFT_OUT = {
    "save_generations": "responses are always written",
    "num_gpus": "one process samples, on one GPU",
    "base_model_name": "engine.export --lora merged merges an adapter",
    "base_model_revision": "engine.export --lora merged merges an adapter",
    "model_paths": "a run's models are models/step-N: name one, or evaluate the run",
    "tokenizer_name": "the tokenizer of the model counts",
    "wandb_run_id": "theirs does not read it",
    "sanity_check": "give --limit",
    "config": "its values are here",
    "env": "set it for the command",
}
_GENERATE_DEFAULTS = {"split": "validation", "temperature": 0.7, "top_p": 1.0, "max_new_tokens": 48}
_DTYPE = "model.dtype; auto leaves the default"

TABLES = {
    "sft.py": Table(
        "engine.run",
        _RENAMED,
        _DERIVED
        | {
            "task_type": "data.prompt_column and data.completion_column: query and reference_response for tldr, prompt "
            "and chosen for hh",
            "max_seq_length": "data.max_row_tokens, with data.too_long cut",
            "torch_dtype": keys.DERIVED["torch_dtype"],
        },
        {key: why for key, why in _LEFT_OUT.items() if key != "tokenizer_name"}
        | {
            "output_model_name": "theirs does not read it",
            "packing": "sequences are always packed, and see only themselves",
            "dataset_text_field": "task_type decides",
        },
        _DEFAULTS | {"task_type": "hh", "max_seq_length": 1024},
    ),
    "reward_modeling.py": Table(
        "engine.run",
        _RENAMED,
        _DERIVED | {"max_length": "data.max_row_tokens; longer rows are dropped, where theirs fails at the first"},
        _LEFT_OUT | {"torch_dtype": "theirs does not read it: model.dtype follows bf16 and fp16"},
        _DEFAULTS,
    ),
    "relabel_with_rm.py": Table(
        "engine.relabel",
        {"model_name_or_path": "reward.model", "dataset_name": "data.path", "train_split": "data.split"},
        {
            "torch_dtype": _DTYPE,
            "output_name": "output: its last part, as a .parquet file",
            "eval_split": "a second command, whose data.split it is; named in a note",
        },
        _JUDGE_LEFT_OUT
        | {
            "tokenizer_name": "the tokenizer of the reward model counts",
            "wandb_run_id": "theirs has none",
            "template": "theirs does not read it",
            "seed": "nothing is drawn",
            "push_to_hub": "nothing is uploaded",
            **{key: _LEFT_OUT[key] for key in ("model_revision", "trust_remote_code", "attn_implementation")},
            **{
                key: _LEFT_OUT[key]
                for key in ("load_in_8bit", "load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant")
            },
            **dict.fromkeys(
                ["use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_modules_to_save"]
                + ["lora_task_type"],
                "theirs does not read it",
            ),
        },
        {"train_split": "train", "eval_split": "validation"},
    ),
    "generate_for_eval.py": Table(
        "engine.generate",
        _GENERATE_RENAMED,
        {
            "model_name_or_path": "the model that the command names",
            "dataset_path": "output: its last part, as a .parquet file",
            "torch_dtype": _DTYPE,
        },
        _GENERATE_LEFT_OUT,
        _GENERATE_DEFAULTS,
    ),
    "load_and_eval.py": Table(
        "engine.evaluate",
        _GENERATE_RENAMED | {"ref_model_name": "reference", "gold_model_name": "reward.model"},
        {
            "model_name_or_path": "the run or model that the command names",
            "dataset_path": "output, the folder of the results",
            "torch_dtype": _DTYPE,
        },
        _GENERATE_LEFT_OUT
        | _JUDGE_LEFT_OUT
        | {
            "gold_tokenizer_name": "the tokenizer of the reward model counts",
            "gold_model_revision": "the newest files",
        },
        _GENERATE_DEFAULTS | {"gold_model_name": "EleutherAI/pythia-410m"},
    ),
}
"""By script. ``load_and_eval.py`` has those of ``generate_for_eval.py`` too: ``engine.evaluate`` does both."""
