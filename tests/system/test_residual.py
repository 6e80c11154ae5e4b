"""The residual stream in fp32: nearer to the exact model, and nothing that wraps a model notices."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from engine.config import Config, Lora
from engine.machine.world import World, joined
from engine.rollouts import experience
from engine.training import lora, models, residual, weights
from engine.training.packing import Microbatch, microbatches
from engine.training.trainer import Trainer
from tests.system import gradients

FAMILIES = ("Qwen2", "Llama", "Mistral", "Qwen3")
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with joined("cpu", 5) as alone:
        yield alone


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model of each family in bf16, six layers deep, with distributions that are not flat."""
    found = {}
    for family in FAMILIES:
        config = getattr(transformers, f"{family}Config")(
            hidden_size=96, intermediate_size=160, num_hidden_layers=6, num_attention_heads=6, num_key_value_heads=2,
            head_dim=16, vocab_size=64, tie_word_embeddings=family == "Qwen2", sliding_window=None,
        )  # fmt: skip
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4) if parameter.ndim == 2 else parameter.add_(0.1 * torch.randn_like(parameter))
        found[family] = str(tmp_path_factory.mktemp(family))
        model.to(BF16).save_pretrained(found[family])
    return found


def loaded(folder: str, patched: bool = True, dtype: torch.dtype = BF16, checkpointing: bool = False) -> models.Policy:
    policy = models.load_policy(folder, checkpointing, dtype).train()
    assert not patched or residual.patch(policy.model)
    return policy


def row(world: World) -> Microbatch:
    samples = gradients.batch()
    (packed,) = microbatches(samples, torch.arange(len(samples))[:, None], 1000, world)
    return packed


def forward_backward(policy: models.Policy, world: World) -> list[Tensor]:
    """Log-probabilities and all parameters' gradients on a packed row."""
    logprobs = policy(row(world))
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return [logprobs.detach(), *(p.grad for p in policy.parameters() if p.requires_grad)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def error(value: Tensor, exact: Tensor) -> float:
    return float((value.float() - exact.float()).norm() / exact.float().norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_nearer_to_the_exact_model_than_the_plain_one(
    family: str, folders: dict[str, str], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities and every parameter's gradient, against the same weights in fp32."""
    # An earlier test's ZeRO-3 leaves DeepSpeed's own product in its place, whose 16-bit gradients round more.
    monkeypatch.setattr(torch.nn.functional, "linear", torch._C._nn.linear)
    exact = forward_backward(loaded(folders[family], False, torch.float32), world)
    plain = forward_backward(loaded(folders[family], False), world)
    patched = forward_backward(loaded(folders[family]), world)
    assert all(one.dtype == BF16 for one in patched[1:])
    gaps = [float((found[0] - exact[0]).abs().mean()) for found in (plain, patched)]
    assert gaps[1] < 0.95 * gaps[0]
    errors = [[error(*pair) for pair in zip(found, exact, strict=True)] for found in (plain, patched)]
    assert max(errors[1]) < 0.06 and sum(errors[1]) < 0.85 * sum(errors[0])


def test_what_is_rounded_and_what_is_not(folders: dict[str, str], world: World) -> None:
    """fp32 between layers; 16 bits in all that multiplies, in attention and in the head; the tables' digits bf16's."""
    policy, seen = loaded(folders["Qwen3"]), {}

    def note(name: str) -> Any:
        def hook(module: Any, inputs: Any, arguments: Any, out: Any) -> None:
            seen[name] = (inputs[0] if inputs else arguments.get("hidden_states"), out)

        return hook

    for name, module in policy.model.named_modules():
        module.register_forward_hook(note(name), with_kwargs=True)
    states: list[tuple[torch.dtype, ...]] = []
    attend = policy.model.base_model.layers[0].self_attn.forward.__func__.__globals__["ALL_ATTENTION_FUNCTIONS"]
    packed = attend["packed"]
    attend["packed"] = lambda module, q, k, v, *args, **options: (
        states.append((q.dtype, k.dtype, v.dtype)) or packed(module, q, k, v, *args, **options)
    )
    try:
        forward_backward(policy, world)
    finally:
        attend["packed"] = packed
    assert set(states) == {(BF16, BF16, BF16)} and len(states) == 6
    for name, (first, out) in seen.items():
        if name.endswith(("_proj", "self_attn", "mlp", "q_norm", "k_norm", "lm_head")):
            assert first.dtype == BF16, name
        elif name.startswith("model.layers.") and name.count(".") == 2:
            assert first.dtype == out.dtype == torch.float32, name
    assert seen["model.norm"][1].dtype == BF16
    for table in seen["model.rotary_emb"][1]:
        assert table.dtype == torch.float32 and torch.equal(table, table.to(BF16).float())


@pytest.mark.parametrize("family", ["Qwen2", "Llama"])
def test_checkpointing_changes_no_bit(family: str, folders: dict[str, str], world: World) -> None:
    kept = forward_backward(loaded(folders[family]), world)
    assert same(kept, forward_backward(loaded(folders[family], checkpointing=True), world))


def test_no_other_model_of_the_class_changes(folders: dict[str, str], world: World) -> None:
    plain = loaded(folders["Qwen2"], False)
    before = forward_backward(plain, world)
    plain.zero_grad()
    classes = {type(module): dict(vars(type(module))) for module in plain.modules()}
    forward_backward(loaded(folders["Qwen2"]), world)
    assert all(dict(vars(kind)) == names for kind, names in classes.items())
    assert same(before, forward_backward(plain, world))
    assert not any("forward" in vars(module) for module in plain.modules())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_train_and_come_off(checkpointing: bool, folders: dict[str, str], world: World) -> None:
    policy = loaded(folders["Qwen2"], False, checkpointing=checkpointing)
    lora.add_adapters(policy.model, Lora(rank=4), 0)
    assert residual.patch(policy.model)
    start, *grads = forward_backward(policy, world)
    assert grads and all(torch.isfinite(grad).all() for grad in grads)
    assert torch.equal(start, forward_backward(loaded(folders["Qwen2"]), world)[0]), "B starts at zero"
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if parameter.requires_grad:
                assert (parameter.grad.abs().sum() > 0) == (".lora_B." in name), name
                parameter.add_(0.05)
    assert not torch.equal(start, forward_backward(policy, world)[0])
    with lora.without_adapters(policy), torch.no_grad():
        assert torch.equal(start, policy(row(world)))


def test_zero_3_finds_the_norms(folders: dict[str, str], world: World) -> None:
    """A trainer's log-probabilities are those with whole weights, and a step moves every parameter."""
    logprobs = []
    for stage in (0, 3):
        config = Config.model_validate(
            {
                "algo": "rloo",
                "model": {"dtype": "bfloat16"},
                "train": {"zero_stage": stage, "steps": 1, "tokens_per_microbatch": 60, "learning_rate": 0.01},
                "generation": {"max_logprob_gap": 100.0},
                "kl": {"coef": 0.0},
            }
        )
        one = Trainer(config, world, policy=loaded(folders["Qwen2"]), reference=None, value=None)
        before = {name: tensor.clone() for name, tensor in weights.full_weights(one.policy)}
        batch = gradients.batch()
        logprobs.append(one.logprobs(one.policy, batch))
        rollout = experience.rollout(batch, logprobs[-1], None, None, None)
        objective = experience.objective(config, rollout, 0.0, world)
        tokens = {"old_logprobs": logprobs[-1], "sampler_logprobs": logprobs[-1]}
        assert one.update(batch, tokens, objective, step=0, version=0).metrics["policy/grad_norm"] > 0
        for name, tensor in weights.full_weights(one.policy):
            assert not torch.equal(tensor, before[name]), name
    # Gathered weights lie elsewhere in memory, and a bf16 product on a CPU sums in an order that depends on where.
    torch.testing.assert_close(*logprobs, rtol=0, atol=0.04)


def test_a_value_model_too(folders: dict[str, str], world: World) -> None:
    value, _ = models.load_value(folders["Llama"], dtype=BF16)
    torch.nn.init.normal_(value.model.score.weight)
    assert residual.patch(value.model)
    before, after = value(row(world))
    (before.sum() + after.sum()).backward()
    assert all(p.grad.dtype == BF16 and bool(p.grad.abs().sum() > 0) for p in value.parameters())


def test_other_models_stay_as_they_are(folders: dict[str, str], tiny_model: str) -> None:
    whole = models.load_policy(folders["Qwen2"])
    assert not residual.patch(whole.model), "fp32 has nothing to gain"
    other = copy.deepcopy(whole.model).to(BF16)
    other.config.model_type = "gpt_neox"
    assert not residual.patch(other)
    assert not any("forward" in vars(m) or m._forward_hooks for n in (whole.model, other) for m in n.modules())
