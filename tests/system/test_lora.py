"""LoRA: adapters alone are trained, the policy without them is its reference, and what leaves is merged into copies."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config import Config, ConfigError
from engine.machine.world import World, joined
from engine.rollouts import experience
from engine.training import lora, models, weights
from engine.training.trainer import Trainer
from tests.system import gradients
from tests.system.helpers import run_engine, run_here, steps
from tests.system.test_runs import check_folder, samples, short

ZERO3 = "--launch.ranks 2 --train.zero_stage 3"


@pytest.mark.parametrize("where", ["--train.zero_stage 2", pytest.param(ZERO3, marks=pytest.mark.slow)])
def test_runs_hand_over_export_and_resume(tiny_model: str, tmp_path: Path, where: str) -> None:
    """After large steps, too; the folder that is left loads in transformers, and as an adapter in peft."""
    more = "--algo grpo --kl.coef 0.05 --lora.rank 4 --train.learning_rate 1e-2 --train.steps 4 --save.every_steps 2 "
    more += f"--save.samples_per_step 32 {where}"
    start = run_engine if where == ZERO3 else run_here
    start(short(tiny_model, tmp_path, "whole") + more)
    run = shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(run / "checkpoints" / "step-000004")  # as if killed before
    (run / "partial-model" / "adapter").mkdir(parents=True)  # killed while exporting
    start(f"--resume {run}")
    check_folder(tmp_path / "whole", 4)
    states = list(run.glob("checkpoints/step-*/policy/*model_states.pt"))
    for kept in [torch.load(path, weights_only=False)["module"] for path in states]:
        assert kept and all("lora_" in name for name in kept), "frozen weights are in the model's own folder"
    assert states
    rows = steps(tmp_path / "whole")
    assert all(row["weights/logprob_gap_mean"] < 1e-4 for row in rows), "the sampler has what the trainer has"
    assert rows[0]["kl/ref_mean"] == pytest.approx(0, abs=1e-5) and abs(rows[-1]["kl/ref_mean"]) > 1e-3
    assert samples(run) == samples(tmp_path / "whole")
    ids = torch.tensor([[1, 3, 4, 13, 5, 6, 14]])
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "model")
    adapted = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_model), tmp_path / "whole" / "model" / "adapter"
    )
    with torch.no_grad():
        torch.testing.assert_close(whole(ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(whole(ids).logits, AutoModelForCausalLM.from_pretrained(tiny_model)(ids).logits)


@pytest.fixture(scope="module")
def world():
    with joined("cpu", 5) as alone:
        yield alone


def trainer(path: str, world: World, **settings: object) -> Trainer:
    config = Config.model_validate(
        {
            "algo": "grpo",
            "train": {"steps": 1, "tokens_per_microbatch": 40, "learning_rate": 0.05},
            "lora": {"rank": 4} | settings,
        }
    )
    policy = models.load_policy(path)
    lora.add_adapters(policy.model, config.lora, config.seed)
    return Trainer(config, world, policy=policy, reference=None, value=None)


def update(one: Trainer, step: int) -> dict[str, float]:
    batch = gradients.batch(step)
    old, ref = one.logprobs(one.policy, batch), one.reference_logprobs(batch)
    objective = experience.objective(one.config, experience.rollout(batch, old, ref, None, None), 0.1, one.world)
    return one.update(batch, {"old_logprobs": old, "ref_logprobs": ref}, objective, step=step, version=0).metrics


def test_only_adapters_move_and_copies_are_merged(tiny_model: str, world: World) -> None:
    one = trainer(tiny_model, world)
    module = one.policy.module
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    batch = gradients.batch()
    start = one.logprobs(one.policy, batch)
    for step in range(3):
        assert update(one, step)["policy/grad_norm"] > 0
    for name, parameter in module.named_parameters():
        moved = not torch.equal(parameter, before[name])
        assert moved == (lora.FACTOR.search(name) is not None) == parameter.requires_grad, name
    assert not any("lm_head" in name or "embed" in name for name in before if lora.FACTOR.search(name))
    assert torch.equal(one.reference_logprobs(batch), start), "without adapters it is the policy that it started from"
    assert not torch.equal(one.logprobs(one.policy, batch), start)
    # Against peft's own merge, in the weights that leave; the model's own stay as they are.
    outgoing = {name: tensor.clone() for name, tensor in weights.full_weights(one.policy)}
    assert [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in outgoing.items()] == weights.manifest(
        one.policy
    )
    merged = copy.deepcopy(module.model)
    for layer in merged.modules():
        if isinstance(layer, peft.tuners.tuners_utils.BaseTunerLayer):
            layer.merge()
    own = {lora.base_name(name): parameter for name, parameter in merged.named_parameters()}
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert outgoing.keys() == dict(plain.named_parameters()).keys()
    for name, tensor in outgoing.items():
        torch.testing.assert_close(tensor, own[name].detach(), rtol=1e-6, atol=1e-6)


def test_chosen_layers_have_adapters_and_wrong_names_are_told(tiny_model: str) -> None:
    policy = models.load_policy(tiny_model)
    lora.add_adapters(policy.model, Config.model_validate({"lora": {"rank": 2, "target_modules": ["q_proj"]}}).lora, 0)
    adapted = {name.split(".lora_")[0] for name, _ in policy.model.named_parameters() if lora.FACTOR.search(name)}
    assert adapted and all(name.endswith("q_proj") for name in adapted)
    with pytest.raises(ConfigError, match=r"no linear layer 'query', only: .*q_proj"):
        lora.add_adapters(
            models.load_policy(tiny_model).model,
            Config.model_validate({"lora": {"rank": 2, "target_modules": ["query"]}}).lora,
            0,
        )
