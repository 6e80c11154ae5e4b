"""The update is the same however a batch is split; and nothing outside a response moves it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config import Config
from engine.generation.equal_weights import WeightsDisagreeError
from engine.machine.world import World, joined
from engine.rollouts import experience
from engine.start import build
from engine.training import models, zero
from engine.training.averages import Averages
from engine.training.backward import policy_pass
from engine.training.packing import microbatches
from engine.training.trainer import Trainer
from tests.system import gradients
from tests.system.helpers import run_ranks


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


ALGORITHMS = ("ppo", "rloo", "grpo", "online_dpo", "bok")


@pytest.fixture(scope="module")
def world():
    with joined("cpu", 5) as alone:
        yield alone


@pytest.fixture(scope="module")
def whole(tiny_model: str, world: World) -> dict[str, dict]:
    """An update by each algorithm on eight episodes in one pass."""
    return {algo: gradients.one_update(tiny_model, algo, 0, 1000, world) for algo in ALGORITHMS}


@pytest.fixture(scope="module")
def on_two_ranks(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, dict]]:
    """The same updates on two ranks, by case: processes are started once for all of them."""

    @functools.cache
    def started(*cases: str) -> dict[str, dict]:
        out = tmp_path_factory.mktemp("ranks") / "updates.pt"
        run_ranks(2, gradients.__file__, tiny_model, str(out), *cases)
        return torch.load(out, weights_only=True)

    return started


FAST = (*(f"{algo},0,30" for algo in ALGORITHMS), "ppo,3,16")
SLOW = ("ppo,1,16", "ppo,2,16")


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_gradients_do_not_depend_on_the_split(
    tiny_model: str, world: World, whole: dict[str, dict], on_two_ranks: Callable[..., dict[str, dict]], algo: str
) -> None:
    """(1 x 8) = (8 x 1) = 2 ranks x (4 x 1), in fp32, for both models."""
    expected_update = whole[algo]
    others = [gradients.one_update(tiny_model, algo, 0, 30, world), on_two_ranks(*FAST)[f"{algo},0,30"]]
    for name, expected in expected_update["gradients"].items():
        assert all(float(g.abs().max()) > 0 for g in expected), "every trainable parameter has a gradient"
        for other in others:
            for got, want in zip(other["gradients"][name], expected, strict=True):
                assert relative(got, want) < 2e-6
    for other in others:
        for key, value in expected_update["metrics"].items():
            assert other["metrics"][key] == pytest.approx(value, rel=1e-5, abs=1e-7), key
    for name, tensors in expected_update["weights"].items():
        start = dict(models.load_policy(tiny_model).model.named_parameters()) if name == "policy" else {}
        assert all(float((tensors[n] - p.detach()).abs().max()) > 0 for n, p in start.items()), "every parameter moves"


@pytest.mark.parametrize("stage", [*(pytest.param(one, marks=pytest.mark.slow) for one in (1, 2)), 3])
def test_zero_stages_on_two_ranks_agree_with_one_process(
    whole: dict[str, dict], on_two_ranks: Callable[..., dict[str, dict]], stage: int
) -> None:
    """The same weights after a step, gathered whole; microbatch counts are uneven between the ranks."""
    case = f"ppo,{stage},16"
    one, two = whole["ppo"], on_two_ranks(*(FAST if case in FAST else SLOW))[case]
    for name, expected in one["weights"].items():
        assert two["weights"][name].keys() == expected.keys()
        for key, want in expected.items():
            assert two["weights"][name][key].shape == want.shape
            torch.testing.assert_close(two["weights"][name][key], want, rtol=1e-4, atol=2e-6)
    assert two["metrics"]["policy/grad_norm"] == pytest.approx(one["metrics"]["policy/grad_norm"], rel=1e-4)
    assert two["metrics"]["value/grad_norm"] == pytest.approx(one["metrics"]["value/grad_norm"], rel=1e-4)


def trainer(path: str, world: World, **sections: dict) -> Trainer:
    train = {"steps": 1, "tokens_per_microbatch": 40, "learning_rate": 1e-3} | sections.pop("train", {})
    config = Config.model_validate({"algo": "rloo", "train": train, "kl": {"coef": 0.0}} | sections)
    policy = models.load_policy(path, dtype=getattr(torch, config.model.dtype))
    return Trainer(config, world, policy=policy, reference=None, value=None)


def test_packed_logprobs_equal_one_sequence_at_a_time(tiny_model: str, world: World) -> None:
    """Against transformers' own attention and logits, unpacked: no token sees another sequence, positions restart."""
    samples = gradients.batch()
    got = trainer(tiny_model, world, generation={"temperature": 0.7})
    packed = got.logprobs(got.policy, samples)
    oracle = AutoModelForCausalLM.from_pretrained(tiny_model)
    expected = []
    for one in samples:
        ids = torch.tensor([one.prompt_ids + one.response_ids])
        with torch.no_grad():
            logits = oracle(ids).logits[0, len(one.prompt_ids) - 1 : -1].double() / 0.7
        expected.append(logits.log_softmax(-1).gather(-1, torch.tensor(one.response_ids)[:, None])[:, 0])
    torch.testing.assert_close(packed.double(), torch.cat(expected), rtol=0, atol=2e-5)


def test_value_model_reads_the_right_positions(tiny_model: str, world: World) -> None:
    """Before each response token and after the last, against an unpacked pass of the same network."""
    value, new_head = models.load_value(tiny_model)
    assert new_head and float(value.model.score.weight.detach().abs().max()) == 0.0
    torch.nn.init.normal_(value.model.score.weight)
    samples = gradients.batch()
    (micro,) = microbatches(samples, torch.arange(len(samples))[:, None], 1000, world)
    with torch.no_grad():
        rows, ends = value(micro)
        start = 0
        for place, i in enumerate(micro.indices):
            one = samples[i]
            hidden = (
                AutoModelForCausalLM.from_pretrained(tiny_model)
                .model(torch.tensor([one.prompt_ids + one.response_ids]))
                .last_hidden_state[0]
            )
            every = value.model.score(hidden)[:, 0]
            length = len(one.response_ids)
            torch.testing.assert_close(
                rows[start : start + length], every[len(one.prompt_ids) - 1 : -1], rtol=0, atol=1e-4
            )
            torch.testing.assert_close(ends[place], every[-1], rtol=0, atol=1e-4)
            start += length


def test_learning_rate_zero_keeps_log_ratios_at_zero(tiny_model: str, world: World) -> None:
    """Through several epochs and minibatches at temperature 0.6: no dropout, no packing and no temperature differ."""
    got = trainer(
        tiny_model,
        world,
        generation={"temperature": 0.6, "max_logprob_gap": 100.0},
        train={"learning_rate": 0.0, "epochs_per_batch": 2, "minibatches_per_batch": 4},
    )
    samples = gradients.batch()
    old = got.logprobs(got.policy, samples)
    rollout = experience.rollout(samples, old, None, None, None)
    objective = experience.objective(got.config, rollout, 0.0, world)
    tokens = {"old_logprobs": old, "sampler_logprobs": old}
    metrics = got.update(samples, tokens, objective, step=0, version=0).metrics
    assert metrics["policy/log_ratio_abs"] < 5e-6  # fp32 rounding of differently shaped products
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=5e-6)
    assert metrics["policy/clip_fraction"] == metrics["policy/clamp_fraction"] == 0.0
    assert metrics["policy/grad_norm"] > 0


@pytest.mark.parametrize("algo, ratio, version", [("grpo", "token", 0), ("grpo", "token", 1), ("rloo", "sequence", 1)])
def test_the_only_step_gives_the_old_logprobs(
    tiny_model: str, world: World, algo: str, ratio: str, version: int
) -> None:
    """The same as with a pass of its own before: gradient, importance weights, and where fresh the sampler's gap."""
    sections = {"schedule": {"staleness": 1}, "generation": {"max_logprob_gap": 100.0}, "rloo": {"ratio": ratio}}
    norms, gaps = [], []
    for given in (True, False):
        got = trainer(tiny_model, world, algo=algo, kl={"coef": 0.0}, **sections)
        samples = gradients.batch()
        old, behaviour = got.logprobs(got.policy, samples), experience.behaviour_logprobs(samples)
        objective = experience.objective(got.config, experience.rollout(samples, None, None, None, None), 0.0, world)
        assert objective.loss["is_cap"]
        tokens = {"sampler_logprobs": behaviour} | ({"old_logprobs": old} if given else {})
        update = got.update(samples, tokens, objective, step=0, version=version)
        norms.append(update.metrics["policy/grad_norm"])
        gaps.append(update.metrics.get("weights/logprob_gap_mean"))
        assert update.metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-6)
        if given:
            assert update.old_logprobs is None
        else:
            assert update.old_logprobs is not None
            torch.testing.assert_close(update.old_logprobs, old, rtol=0, atol=5e-6)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5) and norms[0] > 0
    assert (gaps[0] is None) == (gaps[1] is None) == (version == 1)
    assert version == 1 or gaps[0] == pytest.approx(gaps[1], rel=1e-4)


@pytest.mark.parametrize("limit", [0.0, 0.25])
def test_gradient_norm_is_told_before_clipping(tiny_model: str, world: World, limit: float) -> None:
    """The metric is the norm as computed; the optimizer gets the clipped gradient, or with 0 the whole one."""
    got = trainer(tiny_model, world, train={"max_grad_norm": limit})
    parameters = list(got.policy.module.parameters())
    applied: list[float] = []
    got.policy.optimizer.register_step_pre_hook(
        lambda *_: applied.append(float(torch.nn.utils.get_total_norm([p.grad for p in parameters])))
    )
    samples = gradients.batch()
    for one in samples:
        one.reward *= 100
    old = got.logprobs(got.policy, samples)
    objective = experience.objective(got.config, experience.rollout(samples, old, None, None, None), 0.0, world)
    told = got.update(samples, {"old_logprobs": old}, objective, step=0, version=0).metrics["policy/grad_norm"]
    assert told > 1.5, "a gradient with something to clip"
    assert applied == [pytest.approx(limit or told, rel=1e-4)]


@pytest.mark.parametrize("minibatches", [1, 4])
def test_disagreeing_sampler_stops_the_run(tiny_model: str, world: World, minibatches: int) -> None:
    """By the mean over all tokens, before the first step is taken, also where that step sees a quarter of them."""
    got = trainer(tiny_model, world, generation={"max_logprob_gap": 0.01}, train={"minibatches_per_batch": minibatches})
    samples = gradients.batch()
    for one in samples:
        one.policy_version = 41
    old = got.logprobs(got.policy, samples)
    objective = experience.objective(got.config, experience.rollout(samples, old, None, None, None), 0.0, world)
    sampler = old + 0.005
    sampler[-1] += 0.05
    before = [p.detach().clone() for p in got.policy.module.parameters()]
    with pytest.raises(WeightsDisagreeError, match=r"step 8: .*version 41.*rank 0.*max_logprob_gap"):
        got.update(samples, {"old_logprobs": old, "sampler_logprobs": sampler + 0.5}, objective, step=7, version=41)
    assert all(torch.equal(a, b) for a, b in zip(before, got.policy.module.parameters(), strict=True))
    got = trainer(tiny_model, world, generation={"max_logprob_gap": 0.01}, train={"minibatches_per_batch": minibatches})
    told = got.update(
        samples, {"old_logprobs": old, "sampler_logprobs": sampler}, objective, step=7, version=41
    ).metrics
    assert told["weights/logprob_gap_mean"] == pytest.approx(0.005 + 0.05 / len(old), rel=1e-3)
    assert told["weights/logprob_gap_p999"] == pytest.approx(0.055, rel=1e-3)


def test_zero_advantages_give_zero_finite_gradients(tiny_model: str, world: World) -> None:
    """A batch with nothing to learn from still has a graph: no step is skipped, nothing is NaN, nothing moves."""
    got = trainer(tiny_model, world)
    samples = gradients.batch()
    for one in samples:
        one.reward = 1.0
    before = [p.detach().clone() for p in got.policy.module.parameters()]
    old = got.logprobs(got.policy, samples)
    objective = experience.objective(got.config, experience.rollout(samples, old, None, None, None), 0.0, world)
    metrics = got.update(samples, {"old_logprobs": old}, objective, step=0, version=0).metrics
    assert metrics["policy/grad_norm"] == 0.0 and metrics["policy/loss"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, got.policy.module.parameters(), strict=True))


def test_fully_masked_microbatch_has_a_graph_and_no_gradient(tiny_model: str, world: World) -> None:
    """What keeps a rank in step with the others: a zero loss, zero finite gradients, metrics of nothing."""
    got = trainer(tiny_model, world)
    samples = gradients.batch()
    (micro,) = microbatches(samples, torch.arange(len(samples))[:, None], 1000, world)
    masked = dataclasses.replace(micro, counts=False)
    ones = torch.ones(len(micro.rows))
    row = {"old_logprobs": -ones, "advantages": ones, "sampler_logprobs": -ones}
    objective = experience.objective(got.config, experience.rollout(samples, -ones, None, None, None), 0.0, world)
    averages = Averages(world)
    loss, _ = policy_pass(got.policy, masked, 0 * ones, row, objective, got.config.train, got.head_options, averages)
    assert loss == 0.0 and all(value == 0.0 for value in averages.means().values())
    assert all(float(p.grad.abs().max()) == 0.0 for p in got.policy.module.parameters())


def test_matrices_that_a_sampler_fuses_are_neighbours(tmp_path: Path, world: World) -> None:
    """In ZeRO's buffer, biases or not: q, k, v and gate, up; what the zero-copy hand-over rests on."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 15}
    model = Qwen2ForCausalLM(Qwen2Config(num_attention_heads=4, num_key_value_heads=2, **shape))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.normal_()
    model.save_pretrained(tmp_path)
    got = trainer(str(tmp_path), world, model={"dtype": "bfloat16"}, train={"zero_stage": 2})
    parameters = dict(got.policy.module.named_parameters())
    for name, expected in model.named_parameters():
        assert torch.equal(parameters[f"model.{name}"], expected.to(torch.bfloat16)), name
    for first, second in (("q_proj", "k_proj"), ("k_proj", "v_proj"), ("gate_proj", "up_proj")):
        pairs = [(parameters[n], parameters[n.replace(first, second)]) for n in parameters if f"{first}.weight" in n]
        assert len(pairs) == 2
        assert all(a.data_ptr() + a.nbytes == b.data_ptr() for a, b in pairs)


@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_model_is_held_once_in_its_own_numbers(tiny_model: str, world: World, stage: int) -> None:
    """No fp32 copy of a frozen 16-bit model, and RoPE's frequencies stay fp32 whatever the weights are."""
    config = Config.model_validate({"algo": "rloo", "train": {"zero_stage": stage}, "model": {"dtype": "bfloat16"}})
    engine = zero.prepare_deepspeed(models.load_policy(tiny_model, dtype=torch.bfloat16), config)
    held = [getattr(p, "ds_tensor", p) for p in engine.module.parameters()]
    assert all(tensor.dtype == torch.bfloat16 for tensor in held)
    assert not getattr(engine.optimizer, "fp32_partitioned_groups_flat", None) and engine.basic_optimizer is None
    buffers = dict(engine.module.named_buffers())
    assert buffers and all(b.dtype == torch.float32 for name, b in buffers.items() if "inv_freq" in name)
    got = trainer(tiny_model, world, train={"zero_stage": stage}, model={"dtype": "bfloat16"})
    samples = gradients.batch()
    assert torch.equal(got.logprobs(engine, samples), got.logprobs(got.policy, samples)), "the same forward pass"


def test_gradient_checkpointing_changes_nothing(tiny_model: str, world: World) -> None:
    samples = gradients.batch()
    norms = []
    for checkpointing in (False, True):
        got = trainer(tiny_model, world)
        if checkpointing:
            policy = models.load_policy(tiny_model, gradient_checkpointing=True)
            got = Trainer(got.config, world, policy=policy, reference=None, value=None)
            assert got.policy.module.model.is_gradient_checkpointing
        old = got.logprobs(got.policy, samples)
        objective = experience.objective(got.config, experience.rollout(samples, old, None, None, None), 0.0, world)
        norms.append(
            got.update(samples, {"old_logprobs": old}, objective, step=0, version=0).metrics["policy/grad_norm"]
        )
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


@pytest.mark.parametrize("planned", [False, True])
def test_the_plan_says_whether_activations_are_recomputed(tiny_model: str, world: World, planned: bool) -> None:
    config = trainer(tiny_model, world).config.model_copy(update={"algo": "ppo"})
    loaded = build.load_models(config, tiny_model, world, checkpointing=planned, say=print)
    built = Trainer(config, world, policy=loaded.policy, reference=loaded.reference, value=loaded.value)
    for engine in built.engines.values():
        assert engine.module.model.is_gradient_checkpointing == planned
    built.recompute_activations()
    assert all(engine.module.model.is_gradient_checkpointing for engine in built.engines.values())


def test_dropout_is_off_however_a_model_keeps_it(tmp_path: Path, world: World) -> None:
    """OPT calls functional dropout with a number; two passes in training mode must agree."""
    from transformers import OPTConfig, OPTForCausalLM

    shape = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 15}
    OPTForCausalLM(OPTConfig(dropout=0.5, word_embed_proj_dim=32, **shape)).save_pretrained(tmp_path)
    policy = models.load_policy(str(tmp_path)).train()
    (micro,) = microbatches(gradients.batch(), torch.arange(gradients.EPISODES)[:, None], 1000, world)
    assert torch.equal(policy(micro), policy(micro))


def test_missing_head_weights_are_an_error(tiny_model: str, tmp_path: Path) -> None:
    from engine.config import ConfigError

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    state = {k: v for k, v in model.state_dict().items() if not k.startswith("lm_head")}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ConfigError, match="lm_head"):
        models.load_policy(str(tmp_path))
