"""Configurations of async_rlhf translate whole: every key is accounted for, here and in the docs."""

from pathlib import Path

import pytest
import yaml

from engine import cli
from engine import from_async_rlhf as theirs
from engine.config import ConfigError

DOC = (Path(__file__).resolve().parents[2] / "docs" / "from-async-rlhf.md").read_text()
COMPONENTS = [
    "OnlineDPOTrainer",
    "OnlineDPOVLLMTrainer",
    "OnlineDPOSingleVLLMTrainer",
    "OnlineBoKTrainer",
    "MyRLOOTrainer",
    "PPOv2Trainer",
    "PolicyAndValueWrapper",
    "OnlineTrainerState",
    "OnlineDPOConfig",
    "prepare_deepspeed",
    "repeat_generator",
    "generate_completions",
    "vllm_generate",
    "vllm_single_gpu_patch",
    "TRLParser",
    "YamlConfigParser",
]
COMMON = {
    "dataset_name": "tldr.jsonl", "max_length": 512, "total_episodes": 4032, "response_length": 53, "num_ppo_epochs": 1,
    "num_mini_batches": 1, "learning_rate": 3e-6, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 21,
    "sft_model_path": "some/sft", "model_name_or_path": "some/sft", "reward_model_path": "some/rm",
    "non_eos_penalty": True, "stop_token": "eos", "save_steps": 0.25, "logging_steps": 100, "wandb_run_id": "slurm",
}  # fmt: skip


def converted(script: str, processes: int = 1, **keys: object) -> dict[str, object]:
    found, _ = theirs.translate(script, COMMON | keys, processes)
    config = cli.validate(theirs.nested(found))
    return dict(cli.flat(config))


def check(flat: dict[str, object], tmp_path: Path, ranks: int) -> None:
    """What comes out can run."""
    (tmp_path / "tldr.jsonl").touch()
    changed = {key: value for key, value in flat.items() if value is not None} | {
        "data.path": str(tmp_path / "tldr.jsonl")
    }
    cli.validate(theirs.nested(changed)).check(ranks, "cuda")


def test_one_step_off_policy_online_dpo(tmp_path: Path) -> None:
    """Three train and one generates; a batch is 8 x 21 prompts a process."""
    found = converted("online_dpo.py", 3, vllm=True, loss_type="ipo", bf16=True)
    assert (found["algo"], found["dpo.loss"], found["model.dtype"]) == ("online_dpo", "ipo", "bfloat16")
    assert (found["schedule.placement"], found["schedule.staleness"], found["launch.ranks"]) == ("split", 1, 4)
    assert (found["rollout.prompts_per_step"], found["train.steps"]) == (504, 8)
    assert (found["rollout.missing_eos_reward"], found["save.every_steps"]) == (-1.0, 2)
    assert found["generation.backend"] == "vllm" and found["reward.model"] == "some/rm"
    check(found, tmp_path, 4)


def test_on_one_gpu_and_in_turns(tmp_path: Path) -> None:
    found = converted("online_dpo.py", vllm=True, single=True, sync=True)
    assert (found["schedule.placement"], found["schedule.staleness"], found["launch.ranks"]) == ("colocated", 0, 1)
    check(found, tmp_path, 1)


def test_rloo_counts_responses_and_bok_prompts(tmp_path: Path) -> None:
    rloo, bok = converted("rloo.py", 2), converted("rloo.py", 2, bok=True)
    assert (rloo["algo"], rloo["rollout.prompts_per_step"], rloo["train.steps"]) == ("rloo", 168, 12)
    assert (bok["algo"], bok["rollout.prompts_per_step"], bok["rollout.samples_per_prompt"]) == ("bok", 336, 2)
    for found in (rloo, bok):
        check(found, tmp_path, 2)


def test_ppo_values_start_from_the_reward_model(tmp_path: Path) -> None:
    found = converted("ppov2.py", fp16=True, cliprange=0.1, vf_coef=0.2)
    assert (found["model.value_path"], found["model.path"]) == ("some/rm", "some/sft")
    assert (found["rollout.samples_per_prompt"], found["model.dtype"]) == (1, "float16")
    assert (found["train.clip_low"], found["train.clip_high"], found["ppo.value_coef"]) == (0.1, 0.1, 0.2)
    check(found, tmp_path, 1)


def test_command_line_over_file_and_env(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "theirs.yml").write_text(yaml.safe_dump(COMMON | {"env": {"HF_HOME": "/data"}}))
    arguments = ["rloo.py", "--config", str(tmp_path / "theirs.yml"), "--learning_rate", "1e-5", "--bok", "--seed", "7"]
    assert theirs.main(arguments) == 0
    printed = capsys.readouterr().out
    config = cli.validate(yaml.safe_load(printed))
    assert (config.algo, config.train.learning_rate, config.seed, config.env) == ("bok", 1e-5, 7, {"HF_HOME": "/data"})
    assert "# Not here: logging_steps: " in printed


def test_lora(tmp_path: Path) -> None:
    found = converted("online_dpo.py", use_peft=True, lora_r=16, lora_alpha=64, lora_target_modules=["q_proj"])
    assert (found["lora.rank"], found["lora.alpha"], found["lora.target_modules"]) == (16, 64, ["q_proj"])
    assert converted("online_dpo.py", lora_r=16)["lora.rank"] == 0


@pytest.mark.parametrize("keys", [{"loss_type": "kto_pair"}, {"no_such_key": 1}, {"lr_scheduler_type": "polynomial"}])
def test_what_has_no_counterpart_is_refused(keys: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(keys))):
        theirs.translate("online_dpo.py", COMMON | keys, 1)


def test_docs_name_every_component_and_every_key() -> None:
    for component in COMPONENTS:
        assert f"`{component}`" in DOC, component
    for key, here in (theirs.RENAMED | theirs.DERIVED | theirs.LEFT_OUT).items():
        row = next(line for line in DOC.splitlines() if line.startswith(f"| `{key}` |"))
        assert here in row, key


def test_keys_lead_somewhere() -> None:
    ours = {key for key, _ in cli.leaves()}
    assert set(theirs.RENAMED.values()) <= ours
