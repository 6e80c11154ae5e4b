"""Configurations of async_rlhf translate whole: every key is accounted for, here and in the docs."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.config import ConfigError, cli
from engine.config.keys import leaves
from engine.evaluation.settings import Evaluate, Generate, Relabel
from engine.from_async_rlhf import command_line, keys, pipeline
from engine.from_async_rlhf import translation as converter
from engine.from_async_rlhf.pipeline_keys import TABLES
from engine.start import checks

ROOT = Path(__file__).resolve().parents[2]
DOC = (ROOT / "docs" / "from-async-rlhf.md").read_text()
COMPONENTS = """
    OnlineDPOTrainer OnlineDPOVLLMTrainer OnlineDPOSingleVLLMTrainer OnlineBoKTrainer MyRLOOTrainer PPOv2Trainer
    PolicyAndValueWrapper OnlineTrainerState OnlineDPOConfig OnlineDPOVLLMConfig prepare_deepspeed repeat_generator
    generate_completions vllm_generate vllm_single_gpu_patch TRLParser YamlConfigParser WandbLogModelConfig copy_to
    prepare_dataset MyDPOTrainer MyDPOConfig KLPipeline PerplexityCallback RLOOTrainer sft.py reward_modeling.py
    online_dpo.py rloo.py ppov2.py callbacks.py
    relabel_with_rm.py generate_for_eval.py load_and_eval.py train.sh train_generate_eval.sh generate_eval.sh env.sh
"""
SCRIPT_ARGUMENTS = """
    output_global_parent_dir dataset_name dataset_train_split dataset_test_split max_length config vllm bok single
    wandb_run_id
"""
RLOO_AND_PPO = """
    exp_name run_name sanity_check num_mini_batches total_episodes local_rollout_forward_batch_size
    num_sample_generations base_model response_length stop_token stop_token_id temperature penalty_reward_value
    non_eos_penalty reward_model_path sft_model_path num_ppo_epochs vf_coef cliprange cliprange_value gamma lam
    whiten_rewards kl_coef rloo_k world_size num_updates micro_batch_size local_batch_size batch_size
    local_mini_batch_size mini_batch_size
"""
MODEL_CONFIG = """
    model_name_or_path model_revision torch_dtype trust_remote_code attn_implementation use_peft lora_r lora_alpha
    lora_dropout lora_target_modules lora_modules_to_save lora_task_type load_in_8bit load_in_4bit bnb_4bit_quant_type
    use_bnb_nested_quant
"""
ONLINE_DPO_CONFIG = """
    save_generations beta label_smoothing loss_type label_pad_token_id padding_value truncation_mode max_prompt_length
    max_target_length is_encoder_decoder disable_dropout generate_during_eval precompute_ref_log_probs dataset_num_proc
    model_init_kwargs ref_model_init_kwargs model_adapter_name ref_adapter_name reference_free force_use_ref_model
    sync_ref_model ref_model_mixup_alpha ref_model_sync_steps rpo_alpha sync vllm_device vllm_gpu_memory_utilization
"""
OTHER_SCRIPTS = {
    "sft.py": """task_type output_global_parent_dir dataset_name dataset_train_split dataset_eval_split
        output_model_name wandb_run_id sanity_check max_seq_length packing""",
    "reward_modeling.py": """dataset_name dataset_train_split dataset_eval_split tokenizer_name wandb_run_id
        sanity_check output_global_parent_dir max_length""",
    "relabel_with_rm.py": """dataset_name tokenizer_name train_split eval_split batch_size template seed sanity_check
        output_name push_to_hub""",
    "generate_for_eval.py": """save_generations num_gpus base_model_name base_model_revision model_name_or_path
        model_paths tokenizer_name dataset_name split temperature top_p max_new_tokens torch_dtype sanity_check
        wandb_run_id dataset_path""",
    "load_and_eval.py": """model_name_or_path ref_model_name sanity_check wandb_run_id gold_model_name
        gold_model_revision torch_dtype batch_size gold_tokenizer_name dataset_path""",
}
OF_TRAINING_ARGUMENTS = """
    output_dir learning_rate per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps fp16
    bf16 save_strategy save_steps hub_strategy logging_steps evaluation_strategy eval_steps report_to num_train_epochs
    gradient_checkpointing push_to_hub hub_model_id lr_scheduler_type ddp_find_unused_parameters seed max_grad_norm
"""
COMMON: dict[str, Any] = {
    "dataset_name": "tldr.jsonl", "max_length": 512, "total_episodes": 4032, "response_length": 53, "num_ppo_epochs": 1,
    "num_mini_batches": 1, "learning_rate": 3e-6, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 21,
    "sft_model_path": "some/sft", "model_name_or_path": "some/sft", "reward_model_path": "some/rm",
    "non_eos_penalty": True, "stop_token": "eos", "save_steps": 0.25, "logging_steps": 100, "wandb_run_id": "slurm",
}  # fmt: skip
THEIRS: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "onlinedpo_410m": (
        "online_dpo.py", 1, {"total_episodes": 131072, "gradient_accumulation_steps": 16, "loss_type": "sigmoid"},
        {"algo": "online_dpo", "rollout.prompts_per_step": 128, "train.steps": 1024, "save.every_steps": 256,
         "generation.backend": "hf", "schedule.staleness": 0, "launch.ranks": 1, "model.dtype": "float32"},
    ),
    "onlinedpo_1b_4gpu": (
        "online_dpo.py", 4, {"total_episodes": 131072, "per_device_train_batch_size": 16, "bf16": True,
                             "gradient_accumulation_steps": 8, "torch_dtype": "bfloat16"},
        {"rollout.prompts_per_step": 512, "train.steps": 256, "launch.ranks": 4, "model.dtype": "bfloat16"},
    ),
    "onlinedpo_410m_vllm_1gpu": (
        "online_dpo.py", 1, {"total_episodes": 131072, "gradient_accumulation_steps": 64, "vllm": True, "single": True,
                             "vllm_device": "cuda:0", "vllm_gpu_memory_utilization": 0.2},
        {"generation.backend": "vllm", "schedule.placement": "colocated", "schedule.staleness": 1, "launch.ranks": 1,
         "rollout.prompts_per_step": 512},
    ),
    "onlinedpo_2.8b_vllm_4gpu": (
        "online_dpo.py", 3, {"total_episodes": 129024, "per_device_train_batch_size": 6, "vllm": True, "bf16": True,
                             "gradient_accumulation_steps": 28, "num_sample_generations": 5},
        {"generation.backend": "vllm", "schedule.placement": "split", "schedule.staleness": 1, "launch.ranks": 4,
         "rollout.prompts_per_step": 504, "train.steps": 256, "eval.every_steps": 51},
    ),
    "rloo_410m": (
        "rloo.py", 2, {"fp16": True}, {"algo": "rloo", "rollout.prompts_per_step": 168, "train.steps": 12,
                                       "model.dtype": "float16", "kl.coef": 0.05},
    ),
    "bo2_410m": (
        "rloo.py", 2, {"bok": True}, {"algo": "bok", "rollout.prompts_per_step": 336, "rollout.samples_per_prompt": 2},
    ),
    "ppo_410m": (
        "ppov2.py", 1, {"fp16": True, "cliprange": 0.1, "vf_coef": 0.3},
        {"algo": "ppo", "model.path": "some/sft", "model.value_path": "some/rm", "rollout.samples_per_prompt": 1,
         "train.clip_low": 0.1, "train.clip_high": 0.1, "ppo.value_coef": 0.3},
    ),
}  # fmt: skip


def flat(script: str = "online_dpo.py", processes: int = 1, launcher: Any = None, **theirs: Any) -> dict[str, Any]:
    return dict(cli.flat(converter.translate(script, COMMON | theirs, processes, launcher)[0]))


@pytest.mark.parametrize("name", THEIRS)
def test_their_configurations_can_run(name: str) -> None:
    """What comes out is what theirs says, and passes every check for its number of GPUs."""
    script, processes, theirs, expected = THEIRS[name]
    theirs = theirs | {"dataset_name": "some/tldr"}
    config, _ = converter.translate(script, COMMON | theirs, processes)
    found = dict(cli.flat(config))
    assert {key: found[key] for key in expected} == expected
    assert (found["rollout.missing_eos_reward"], found["reward.model"], found["data.eval_split"]) == (
        -1.0, "some/rm", "test",
    )  # fmt: skip
    checks.check(config, found["launch.ranks"], "cuda")


def test_what_they_do_not_say_is_their_default() -> None:
    found = flat("rloo.py", num_ppo_epochs=None, learning_rate=None, save_steps=None)
    assert (found["train.epochs_per_batch"], found["train.learning_rate"], found["seed"]) == (4, 5e-5, 42)
    assert (found["train.adam_betas"], found["train.schedule"]) == ((0.9, 0.999), "linear")
    assert found["generation.max_batch"] == 64


def test_in_turns_or_overlapping() -> None:
    assert flat(vllm=True, sync=True)["schedule.staleness"] == 0
    assert flat(sync=False)["schedule.staleness"] == 0, "without vLLM theirs is always synchronous"


def test_steps_are_counted_as_theirs() -> None:
    """Theirs saves by optimizer steps, of which a batch here has 2 x 4, and warms up by batches."""
    found = flat("rloo.py", num_mini_batches=2, num_ppo_epochs=4, save_steps=16, warmup_steps=3)
    assert (found["rollout.prompts_per_step"], found["train.steps"]) == (168, 12)
    assert (found["save.every_steps"], found["train.warmup_steps"]) == (2, 24)
    assert flat(lr_scheduler_type="constant", warmup_steps=3)["train.warmup_steps"] == 0
    assert flat(save_strategy="no")["save.every_steps"] == 0
    assert flat(num_sample_generations=0)["eval.every_steps"] == 0


def test_lora() -> None:
    found = flat(use_peft=True)
    assert (found["lora.rank"], found["lora.alpha"], found["lora.target_modules"]) == (16, 32, [])
    assert flat(use_peft=True, lora_target_modules="all-linear")["lora.target_modules"] == []
    assert flat(use_peft=True, lora_target_modules=["query_key_value"])["lora.target_modules"] == ["query_key_value"]
    assert flat(lora_r=8)["lora.rank"] == 0
    assert flat("rloo.py", use_peft=True)["lora.rank"] == 0, "theirs trains every weight there"


def test_what_a_script_does_not_read_changes_nothing() -> None:
    config, notes = converter.translate("rloo.py", COMMON | {"vllm": True, "torch_dtype": "bfloat16"}, 1)
    assert (config.generation.backend, config.schedule.placement, config.model.dtype) == ("hf", "colocated", "float32")
    assert "vllm: rloo.py does not read it" in notes
    found = flat(label_smoothing=0.1, max_grad_norm=0.5)
    assert (found["dpo.label_smoothing"], found["train.max_grad_norm"]) == (0.0, 0.0)


def test_launcher_decides_ranks_zero_and_clipping() -> None:
    launcher = {"distributed_type": "DEEPSPEED", "deepspeed_config.zero_stage": 3, "mixed_precision": "bf16"}
    found = flat(processes=2, launcher=launcher)
    assert (found["train.zero_stage"], found["train.max_grad_norm"], found["model.dtype"]) == (3, 1.0, "bfloat16")
    launcher["deepspeed_config.gradient_clipping"] = 0.5
    assert flat(launcher=launcher)["train.max_grad_norm"] == 0.5
    with pytest.raises(ConfigError, match="no_such_key"):
        flat(launcher={"no_such_key": 1})


def test_command_line_over_file_and_env(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As their README has it: --key value, --key=value, a bare --flag; and what is printed is read by --config."""
    (tmp_path / "theirs.yml").write_text(
        yaml.safe_dump(COMMON | {"env": {"HF_HOME": "/data", "N": 1}, "output_global_parent_dir": "results"})
    )
    (tmp_path / "accelerate.yml").write_text(
        yaml.safe_dump({"deepspeed_config": {"zero_stage": 2}, "distributed_type": "DEEPSPEED", "num_processes": 4})
    )
    arguments = ["rloo.py", "--config", str(tmp_path / "theirs.yml"), "--accelerate", str(tmp_path / "accelerate.yml")]
    arguments += ["--learning_rate=1e-5", "--bok", "--seed", "7", "--penalty_reward_value", "-2", "--output_dir", "a/b"]
    assert command_line.main(arguments) == 0
    printed = capsys.readouterr().out
    config = cli.validate(yaml.safe_load(printed))
    assert (config.algo, config.train.learning_rate, config.seed) == ("bok", 1e-5, 7)
    assert (config.env, config.output_dir, config.name) == ({"HF_HOME": "/data", "N": "1"}, "results", "b")
    assert (config.launch.ranks, config.train.zero_stage, config.rollout.missing_eos_reward) == (4, 2, -2.0)
    assert "# Not here: logging_steps: " in printed
    assert command_line.main([*arguments, "--no_such_key", "1"]) == 2
    assert "no_such_key" in capsys.readouterr().err


SFT = {
    "run_name": "sft_pythia1b_tldr", "output_dir": "sft_pythia1b_tldr", "hub_model_id": "pythia1b-sft-tldr",
    "output_global_parent_dir": "results", "wandb_run_id": "snow", "push_to_hub": True, "task_type": "tldr",
    "model_name_or_path": "EleutherAI/pythia-1b-deduped", "dataset_name": "some/tldr",
    "dataset_eval_split": "validation", "report_to": "wandb", "learning_rate": 1e-5, "fp16": True,
    "lr_scheduler_type": "cosine",
    "gradient_accumulation_steps": 4, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8,
    "num_train_epochs": 1, "max_seq_length": 580, "gradient_checkpointing": False, "evaluation_strategy": "steps",
    "eval_steps": 0.2, "logging_steps": 100, "ddp_find_unused_parameters": False,
}  # fmt: skip
"""Their configs/sft_pythia1b_tldr.yml."""


def test_their_supervised_run_can_run() -> None:
    found = pipeline.translate("sft.py", SFT, 2)
    ours = dict(cli.flat(found.settings))
    expected = {
        "algo": "sft", "model.path": "EleutherAI/pythia-1b-deduped", "data.split": "train", "data.too_long": "cut",
        "data.eval_split": "validation", "data.prompt_column": "query", "data.completion_column": "reference_response",
        "data.max_row_tokens": 580, "train.rows_per_step": 64, "train.epochs": 1.0, "train.schedule": "cosine",
        "train.max_grad_norm": 1.0, "model.dtype": "float16", "save.every_steps": 500, "output_dir": "results",
        "report.wandb": "huggingface", "push.hub_id": "pythia1b-sft-tldr", "push.private": True,
    }  # fmt: skip
    assert {key: ours[key] for key in expected} == expected
    assert "eval_steps 0.2: a share of a run whose steps follow from its rows: give eval.every_steps" in found.notes
    checks.check(found.settings, 2, "cuda")
    timed = dict(cli.flat(pipeline.translate("sft.py", SFT | {"max_steps": 101}).settings))
    assert (timed["train.steps"], timed["eval.every_steps"], timed["train.epochs"]) == (101, 21, None)


def test_their_reward_model_can_be_trained() -> None:
    theirs = {key: value for key, value in SFT.items() if key not in ("task_type", "max_seq_length")}
    found = pipeline.translate("reward_modeling.py", theirs | {"max_length": 640, "tokenizer_name": "x"}, 1)
    ours = dict(cli.flat(found.settings))
    assert (ours["algo"], ours["data.max_row_tokens"], ours["data.too_long"]) == ("reward_model", 640, "drop")
    checks.check(found.settings, 1, "cuda")


def test_their_judges_and_samplers_have_commands() -> None:
    """Their configs/relabel_rm.yml, generate_tldr.yml and evaluate_tldr.yml."""
    relabel = {
        "dataset_name": "some/pairs", "model_name_or_path": "gold", "tokenizer_name": "x", "batch_size": 64,
        "torch_dtype": "float16", "output_name": "me/pairs_relabel", "push_to_hub": True,
    }  # fmt: skip
    found = pipeline.translate("relabel_with_rm.py", relabel)
    assert isinstance(found.settings, Relabel) and found.command == "engine.relabel"
    assert found.settings.output == "pairs_relabel.parquet" and found.settings.reward.model == "gold"
    assert (found.settings.model.dtype, found.settings.data.templated) == ("float16", True)
    assert "eval_split: relabel it by a second command, with --data.split validation" in found.notes
    generate = {"save_generations": True, "dataset_name": "some/tldr", "max_new_tokens": 128, "temperature": 0.010001}
    found = pipeline.translate("generate_for_eval.py", generate | {"model_name_or_path": "results/x"})
    assert isinstance(found.settings, Generate) and (found.command, found.word) == ("engine.generate", "results/x")
    assert (found.settings.data.split, found.settings.rollout.max_response_tokens) == ("validation", 128)
    evaluate = {"wandb_run_id": "snow", "ref_model_name": "sft", "gold_model_name": "gold", "batch_size": 8}
    found = pipeline.translate("load_and_eval.py", generate | evaluate)
    assert isinstance(found.settings, Evaluate) and found.settings.reference == "sft"
    assert (found.settings.reward.model, found.settings.baseline.column) == ("gold", "reference_response")
    assert found.settings.generation.temperature == 0.010001


def test_several_files_of_theirs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed is read by the command that the first line names."""
    (tmp_path / "generate.yml").write_text("dataset_name: some/tldr\nmax_new_tokens: 128\n")
    (tmp_path / "evaluate.yml").write_text("gold_model_name: gold\n")
    files = ["--config", str(tmp_path / "generate.yml"), "--config", str(tmp_path / "evaluate.yml")]
    assert command_line.main(["load_and_eval.py", *files, "--model_name_or_path", "runs/x"]) == 0
    printed = capsys.readouterr().out
    first, *rest = printed.splitlines()
    assert first == "# From async_rlhf's load_and_eval.py: python -m engine.evaluate runs/x --config THIS_FILE"
    given = cli.checked(Evaluate, yaml.safe_load("\n".join(rest)))
    assert (given.rollout.max_response_tokens, given.reward.model) == (128, "gold")


@pytest.mark.parametrize(
    ("script", "given", "name"),
    [
        ("sft.py", {"no_such_key": 1}, "no_such_key"),
        ("sft.py", {"task_type": "chat"}, "task_type chat"),
        ("relabel_with_rm.py", {"max_length": 1}, "max_length"),
        ("relabel_with_rm.py", {"torch_dtype": "int8"}, "torch_dtype int8"),
        ("generate_for_eval.py", {"ref_model_name": "x"}, "ref_model_name"),
        ("load_and_eval.py", {"gold_model_name": "x"}, "dataset_name is missing"),
    ],
)
def test_what_the_others_cannot_have_is_refused_by_name(script: str, given: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        pipeline.translate(script, given)


@pytest.mark.parametrize(
    ("script", "given"),
    [
        ("online_dpo.py", {"no_such_key": 1}),
        ("online_dpo.py", {"loss_type": "hinge"}),
        ("online_dpo.py", {"torch_dtype": "auto"}),
        ("online_dpo.py", {"lr_scheduler_type": "polynomial"}),
        ("online_dpo.py", {"total_episodes": None}),
        ("online_dpo.py", {"env": 3}),
        ("online_dpo.py", {"task_type": "tldr"}),
        ("rloo.py", {"beta": 0.1}),
        ("ppov2.py", {"rloo_k": 2}),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(script: str, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        converter.translate(script, COMMON | given, 1)


def test_every_key_of_theirs_has_one_place() -> None:
    everything = [*keys.RENAMED, *keys.DERIVED, *keys.LEFT_OUT]
    assert len(everything) == len(set(everything))
    fields = SCRIPT_ARGUMENTS + RLOO_AND_PPO + MODEL_CONFIG + ONLINE_DPO_CONFIG + OF_TRAINING_ARGUMENTS
    assert set(fields.split()) <= set(everything)
    for script, table in TABLES.items():
        everything = [*table.renamed, *table.derived, *table.left_out]
        assert len(everything) == len(set(everything)), script
        arguments = OTHER_SCRIPTS[script]
        if script not in ("generate_for_eval.py", "load_and_eval.py"):
            arguments += MODEL_CONFIG
        if table.command == "engine.run":
            arguments += OF_TRAINING_ARGUMENTS
        assert set(arguments.split()) <= set(everything), script


def test_keys_lead_somewhere() -> None:
    """Whatever the table calls a key of Tandem's is one."""
    ours = {key for key, _ in cli.leaves()}
    sections = {key.split(".")[0] for key in ours if "." in key}
    assert set(keys.RENAMED.values()) <= ours
    tables = [keys.DERIVED, keys.LEFT_OUT, keys.LAUNCHER, keys.LAUNCHER_LEFT_OUT]
    for table in TABLES.values():
        kind = pipeline.COMMANDS.get(table.command)
        assert set(table.renamed.values()) <= (ours if kind is None else {key for key, _ in leaves(kind)})
        tables += [table.derived, table.left_out]
    for text in (text for table in tables for text in table.values()):
        for named in re.findall(r"\b([a-z_]+\.[a-z_]+)\b", text):
            if named.split(".")[0] in sections and not named.endswith(".py"):
                assert named in ours, text


def test_docs_have_the_same_tables() -> None:
    """Neither a row too few nor one too many, key by key."""
    here = {key: f"`{value}`" for key, value in keys.RENAMED.items()} | keys.DERIVED
    here |= {key: f"none: {why}" for key, why in keys.LEFT_OUT.items()}
    launcher = keys.LAUNCHER | {key: f"none: {why}" for key, why in keys.LAUNCHER_LEFT_OUT.items()}
    tables = {"## Keys": here, "## Launcher": launcher}
    for script, table in TABLES.items():
        ours = {key: f"`{value}`" for key, value in table.renamed.items()} | table.derived
        tables[f"## Keys of {script}"] = ours | {key: f"none: {why}" for key, why in table.left_out.items()}
    for heading, table in tables.items():
        section = DOC.split(f"\n{heading}\n")[1].split("\n## ")[0]
        rows = [line for line in section.splitlines() if line.startswith("| `")]
        assert rows == [f"| `{key}` | {value} |" for key, value in sorted(table.items())]


def test_docs_name_every_component_and_link_to_what_is_there() -> None:
    section = DOC.split("\n## Components\n")[1].split("\n## ")[0]
    for component in COMPONENTS.split():
        assert re.search(rf"^\|[^|]*`{re.escape(component)}`", section, re.MULTILINE), component
    for target in re.findall(r"\]\(([^)#]+)\)", DOC):
        assert target.startswith("https://") or (ROOT / "docs" / target).exists(), target
