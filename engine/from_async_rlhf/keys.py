"""Every key of async_rlhf's configurations and what it is here: the table of ``engine.from_async_rlhf``.

Theirs are the fields of its scripts' arguments, of OnlineDPOConfig and OnlineDPOVLLMConfig, and of RLOOConfig,
PPOv2Config and ModelConfig of TRL 0.9.4, which it pins; of transformers' TrainingArguments those that it uses.
"""

from __future__ import annotations

from typing import Any

SCRIPTS = {"online_dpo.py": "online_dpo", "rloo.py": "rloo", "ppov2.py": "ppo"}

RENAMED = {
    "reward_model_path": "reward.model",
    "sft_model_path": "model.path",
    "dataset_name": "data.path",
    "dataset_train_split": "data.split",
    "dataset_test_split": "data.eval_split",
    "max_length": "rollout.max_prompt_tokens",
    "response_length": "rollout.max_response_tokens",
    "temperature": "generation.temperature",
    "learning_rate": "train.learning_rate",
    "num_ppo_epochs": "train.epochs_per_batch",
    "num_mini_batches": "train.minibatches_per_batch",
    "cliprange_value": "ppo.value_clip",
    "vf_coef": "ppo.value_coef",
    "gamma": "ppo.gamma",
    "lam": "ppo.lam",
    "beta": "dpo.beta",
    "rloo_k": "rollout.samples_per_prompt",
    "gradient_checkpointing": "model.gradient_checkpointing",
    "adam_epsilon": "train.adam_eps",
    "weight_decay": "train.weight_decay",
    "seed": "seed",
}
"""Keys that mean the same under another name."""

DERIVED = {
    "total_episodes": "train.steps: this over the batch",
    "per_device_train_batch_size": "rollout.prompts_per_step: times accumulation, minibatches and training processes "
    "(in rloo.py over rloo_k); a pass is filled by train.tokens_per_microbatch",
    "gradient_accumulation_steps": "rollout.prompts_per_step, as above",
    "loss_type": "dpo.loss: sigmoid or ipo, all that theirs computes",
    "kl_coef": "kl.coef; nothing in online DPO and BoK, where theirs only measures it",
    "cliprange": "train.clip_low and train.clip_high",
    "non_eos_penalty": "rollout.missing_eos_reward, if true",
    "penalty_reward_value": "rollout.missing_eos_reward, if non_eos_penalty is true",
    "local_rollout_forward_batch_size": "generation.max_batch, where transformers samples",
    "num_sample_generations": "eval.every_steps: train.steps over this",
    "vllm": "generation.backend vllm, and schedule.placement split unless single; rloo.py does not read it",
    "single": "schedule.placement colocated, where vllm is",
    "sync": "schedule.staleness: 0 if true, 1 if false, where vllm is",
    "bok": "algo bok",
    "bf16": "model.dtype bfloat16",
    "fp16": "model.dtype float16",
    "torch_dtype": "model.dtype, where neither bf16 nor fp16 is true; float16 alone trains in float32, as theirs does",
    "lr_scheduler_type": "train.schedule: linear, cosine or constant",
    "warmup_steps": "train.warmup_steps: theirs counts batches, here are optimizer steps",
    "save_strategy": "save.every_steps: 0 unless steps",
    "save_steps": "save.every_steps: theirs counts optimizer steps, here are batches; below 1 it is a share of the run",
    "output_dir": "name, by its last part",
    "output_global_parent_dir": "output_dir",
    "adam_beta1": "train.adam_betas",
    "adam_beta2": "train.adam_betas",
    "use_peft": "lora.rank, by lora_r",
    "lora_r": "lora.rank, if use_peft is true",
    "lora_alpha": "lora.alpha, if use_peft is true",
    "lora_target_modules": "lora.target_modules, if use_peft is true; all-linear is the default here",
    "report_to": "report.wandb, in WANDB_PROJECT of env, where wandb is among it",
    "push_to_hub": "push.hub_id, if true",
    "hub_model_id": "push.hub_id, if push_to_hub is true; a repository that is made is private (push.private)",
    "env": "env",
}
"""Keys that others take part in."""

_PACKED = "sequences are packed by train.tokens_per_microbatch"
_REPORT = "runs write a report, metrics and TensorBoard events by themselves"
_PLACE = "runs lie in output_dir/name"
_SAMPLES = "save.samples_per_step writes samples.jsonl"
_NO_EVAL = "their trainers never evaluate by it; see num_sample_generations"
_COMPUTED = "theirs computes it from the other batch sizes, whatever is given"
_UNREAD = "none of their training scripts reads it"
_ONLINE_DPO_UNREAD = [
    *("label_pad_token_id", "padding_value", "truncation_mode", "max_prompt_length", "max_target_length"),
    *("is_encoder_decoder", "generate_during_eval", "precompute_ref_log_probs", "model_init_kwargs"),
    *("ref_model_init_kwargs", "model_adapter_name", "ref_adapter_name", "reference_free", "force_use_ref_model"),
    *("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps", "rpo_alpha"),
]
LEFT_OUT = {
    "model_name_or_path": "theirs takes the tokenizer from it; here that of model.path counts",
    "num_train_epochs": "train.steps counts batches",
    "stop_token": "the end of sequence always stops a response",
    "stop_token_id": "generation.stop_tokens takes tokens as text",
    "max_grad_norm": "their trainers never read it; train.max_grad_norm follows the launcher",
    "label_smoothing": "their losses never read it; here dpo.label_smoothing",
    "whiten_rewards": "PPO whitens advantages (ppo.whiten_advantages), over all ranks; rewards are never whitened",
    "vllm_device": "the last schedule.generators ranks generate",
    "vllm_gpu_memory_utilization": "the memory plan decides",
    "per_device_eval_batch_size": f"eval.prompts counts held-out prompts; {_PACKED}",
    "lora_dropout": "adapters have no dropout",
    "lora_modules_to_save": "only adapters are trained",
    "lora_task_type": "the policy is always a causal language model",
    "wandb_run_id": _PLACE,
    "run_name": _PLACE,
    "exp_name": _PLACE,
    "logging_steps": _REPORT,
    "save_generations": _SAMPLES,
    "eval_strategy": _NO_EVAL,
    "evaluation_strategy": _NO_EVAL,
    "eval_steps": _NO_EVAL,
    "hub_strategy": "model/ is uploaded at the end alone",
    "sanity_check": "give --train.steps and a small data file",
    "ddp_find_unused_parameters": "DeepSpeed trains on any number of ranks",
    "deepspeed": "train.zero_stage; the launcher's file is read by --accelerate",
    "config": "its values are here",
    "disable_dropout": "dropout is always off",
    "dataset_num_proc": "prompts are tokenized as they are read",
    **dict.fromkeys(
        ["world_size", "num_updates", "micro_batch_size", "local_batch_size", "batch_size", "local_mini_batch_size"]
        + ["mini_batch_size"],
        _COMPUTED,
    ),
    **dict.fromkeys(
        ["base_model", "model_revision", "trust_remote_code", "attn_implementation", "load_in_8bit", "load_in_4bit"]
        + ["bnb_4bit_quant_type", "use_bnb_nested_quant", *_ONLINE_DPO_UNREAD],
        _UNREAD,
    ),
}
"""Keys without a counterpart, and why."""

_ONLINE_DPO = {"beta", "label_smoothing", "loss_type", "single", "sync", "vllm_device", "vllm_gpu_memory_utilization"}
_ONLINE_DPO |= {"save_generations", "disable_dropout", "dataset_num_proc", *_ONLINE_DPO_UNREAD}
FOREIGN = {"online_dpo.py": {"bok"}, "rloo.py": _ONLINE_DPO, "ppov2.py": _ONLINE_DPO | {"rloo_k", "bok", "vllm"}}
"""Keys that a script of theirs refuses, because they are another's."""

IGNORED = {"vllm", "torch_dtype", "use_peft", "lora_r", "lora_alpha", "lora_target_modules"}
"""Keys that rloo.py and ppov2.py take and do not read."""

LAUNCHER = {
    "num_processes": "launch.ranks, with schedule.generators more in a split run",
    "mixed_precision": "model.dtype, where neither bf16, fp16 nor torch_dtype is given",
    "deepspeed_config.zero_stage": "train.zero_stage",
    "deepspeed_config.gradient_clipping": "train.max_grad_norm; with DeepSpeed 1 if not given, else nothing is clipped",
    "distributed_type": "train.max_grad_norm, as above",
}
"""Keys of accelerate's file that have a counterpart."""

LAUNCHER_LEFT_OUT = {
    "deepspeed_config.offload_optimizer_device": "for cpu give train.optimizer_offload cpu",
    "deepspeed_config.offload_param_device": "memory.sleep and memory.offload do",
    "deepspeed_config.zero3_init_flag": "models are read in host memory",
    **dict.fromkeys(["compute_environment", "debug", "downcast_bf16", "main_training_function"], "not needed"),
    **dict.fromkeys(
        [
            "machine_rank",
            "num_machines",
            "rdzv_backend",
            "same_network",
            "deepspeed_config.deepspeed_multinode_launcher",
        ],
        "one machine, or torchrun",
    ),
    **dict.fromkeys(["tpu_env", "tpu_use_cluster", "tpu_use_sudo"], "no TPUs"),
    "use_cpu": "launch.device",
}
"""Keys of accelerate's file that have none, and why."""

DEFAULTS: dict[str, Any] = {
    "sft_model_path": "EleutherAI/pythia-160m",
    "reward_model_path": "EleutherAI/pythia-160m",
    "dataset_test_split": "test",
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_mini_batches": 1,
    "num_ppo_epochs": 4,
    "rloo_k": 2,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "response_length": 53,
    "max_length": 512,
    "temperature": 0.7,
    "kl_coef": 0.05,
    "penalty_reward_value": -1,
    "num_sample_generations": 10,
    "local_rollout_forward_batch_size": 64,
    "save_strategy": "steps",
    "save_steps": 500,
    "seed": 42,
    "lora_r": 16,
    "lora_alpha": 32,
}
"""async_rlhf's own, where a run of it depends on them and Tandem's are others."""
