"""The same models, samples, rewards and settings through TRL's own trainers and through ours.

Where the definitions agree, loss and gradient do. Where they differ a test says how, and that nothing else does. TRL
has no BoK; its online DPO has neither hinge nor label smoothing, and makes its pairs of two responses.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.machine.world import World, joined
from engine.rollouts import experience
from engine.sample import Sample
from engine.training import models
from engine.training.trainer import Trainer
from tests.system import updates
from tests.system.updates import TEMPERATURE, batch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="TRL is not installed: pip install -r requirements/test.txt"
)
LONGEST = 8
"""TRL's max_completion_length."""
K3 = {"beta": 0.1, "use_bias_correction_kl": False}
"""TRL's settings for GRPO's own KL term."""


@dataclass
class Found:
    loss: float
    gradient: dict[str, Tensor]

    def __add__(self, other: Found) -> Found:
        return Found(self.loss + other.loss, {name: g + other.gradient[name] for name, g in self.gradient.items()})

    def __mul__(self, factor: float) -> Found:
        return Found(self.loss * factor, {name: g * factor for name, g in self.gradient.items()})


def assert_agree(ours: Found, theirs: Found) -> None:
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-4, abs=1e-6)
    assert ours.gradient.keys() == theirs.gradient.keys()
    for name, want in theirs.gradient.items():
        assert float((ours.gradient[name] - want).norm()) <= 1e-4 * float(want.norm()), name


@pytest.fixture(scope="module")
def paths(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of the policy that sampled, of the one being trained, a few updates on, and of the reference."""
    folders = {"old": tiny_model}
    for seed, name in enumerate(("new", "ref")):
        model, draw = AutoModelForCausalLM.from_pretrained(tiny_model), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=draw))
        folders[name] = str(tmp_path_factory.mktemp(name))
        model.save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="module")
def trl(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """TRL's trainers and their settings, imported without vLLM, before there is a process group for it to find."""
    import trl.import_utils as available

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(available, "is_vllm_available", lambda *_, **__: False)
        from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
        from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    shared = {
        "output_dir": str(tmp_path_factory.mktemp("trl")),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "temperature": TEMPERATURE,
    }
    GRPOConfig(**shared)  # finds out that this process is alone
    return {
        "rloo": (RLOOTrainer, RLOOConfig, shared),
        "grpo": (GRPOTrainer, GRPOConfig, shared),
        "online_dpo": (OnlineDPOTrainer, OnlineDPOConfig, shared),
    }


def theirs(
    trl: dict[str, Any],
    paths: dict[str, str],
    algo: str,
    samples: Sequence[Sample],
    sampler: bool = False,
    on_policy: bool = False,
    **args: Any,
) -> Found:
    """What TRL's code gives from completions and rewards on: advantages or pairs, loss, gradient.

    Args:
        sampler: hand over the sampler's log-probabilities, as from vLLM.
        on_policy: the samples are of the policy being trained, with ratios of 1.
    """
    from datasets import Dataset

    kind, settings, shared = trl[algo]
    many, generations = len(samples), {}
    if algo != "online_dpo":
        group = sum(one.group_id == samples[0].group_id for one in samples)
        generations = {"num_generations": group, "max_completion_length": LONGEST, "num_iterations": 2}
    policy = AutoModelForCausalLM.from_pretrained(paths["old"])
    reference = AutoModelForCausalLM.from_pretrained(paths["ref"])
    trainer = kind(
        policy,
        args=settings(**shared, per_device_train_batch_size=many, **generations, **args),
        train_dataset=Dataset.from_dict({"prompt": ["1"] * many}),
        processing_class=AutoTokenizer.from_pretrained(paths["old"]),
        reward_funcs=lambda **_: [one.reward for one in samples],
        **({"ref_model": reference} if algo == "online_dpo" else {}),
    )
    completions = [one.response_ids for one in samples]
    new = AutoModelForCausalLM.from_pretrained(paths["new"]).state_dict()
    if algo == "online_dpo":
        policy.load_state_dict(new)
        prompts = [one.prompt_ids for one in samples]
        padded = (*_padded(prompts, "left"), *_padded(completions, "right"))
        trainer._generate = lambda *_: (*padded, None)
        loss = trainer.training_step(policy, {"prompt": ["1"] * (many // 2)})
    else:
        if args.get("beta", 0.0):
            trainer.ref_model.load_state_dict(reference.state_dict())
        trainer._tokenize_prompts = lambda _: ([one.prompt_ids for one in samples], None, {})
        logprobs = [one.behaviour_logprobs.tolist() for one in samples] if sampler else None
        trainer._generate_single_turn = lambda *_: (completions, logprobs) if algo == "grpo" else completions
        trainer.use_vllm = sampler
        trainer.current_gradient_accumulation_steps = 1  # as the training loop would set it
        policy.train()
        inputs = trainer._generate_and_score_completions([{"prompt": "1"}] * many)
        policy.load_state_dict(new)
        if on_policy:
            del inputs["old_per_token_logps"]
        loss = trainer._compute_loss(policy, inputs)
        loss.backward()
    return Found(loss.item(), {name: parameter.grad for name, parameter in policy.named_parameters()})


def _padded(rows: list[list[int]], side: str) -> tuple[Tensor, Tensor]:
    """[B, longest] tokens and mask."""
    ids = [torch.tensor(row) for row in rows]
    masks = [torch.ones_like(row) for row in ids]
    return tuple(pad_sequence(tensors, batch_first=True, padding_side=side) for tensors in (ids, masks))


Ours = Callable[..., Found]


@pytest.fixture(scope="module")
def world(trl: dict[str, Any]) -> Iterator[World]:
    with joined("cpu", 5) as alone:
        yield alone


@pytest.fixture(scope="module")
def ours(world: World, paths: dict[str, str]) -> Ours:
    """An update by our trainer of the policy being trained, on samples of the old one."""
    load = {name: models.load_policy(path) for name, path in paths.items()}
    before = Trainer(updates.config("rloo"), world, policy=load["old"], reference=load["ref"], value=None)
    trainer = Trainer(updates.config("rloo"), world, policy=load["new"], reference=None, value=None)
    parameters: dict[str, nn.Parameter] = dict(trainer.policy.module.model.named_parameters())
    gradient: dict[str, Tensor] = {}
    trainer.policy.optimizer.register_step_pre_hook(
        lambda *_: gradient.update({name: p.grad.clone() for name, p in parameters.items()})
    )

    def update(
        algo: str,
        samples: Sequence[Sample],
        temperature: float = TEMPERATURE,
        on_policy: bool = False,
        **sections: dict[str, Any],
    ) -> Found:
        off = {"generation": {"temperature": temperature}, "off_policy": {"correction": False}}
        config = trainer.config = updates.config(algo, **(off | sections))
        samples = experience.usable(samples, config)
        trainer.head_options["temperature"] = temperature
        sampled_by = trainer if on_policy else before
        old = sampled_by.logprobs(sampled_by.policy, samples, temperature)
        ref = before.logprobs(before.reference, samples, temperature)
        rollout = experience.rollout(samples, old, ref, None, None)
        objective = experience.objective(config, rollout, config.kl.coef, world)
        behaviour = experience.behaviour_logprobs(samples)
        tokens = {"old_logprobs": old, "ref_logprobs": ref, "sampler_logprobs": behaviour}
        metrics = trainer.update(samples, tokens, objective, step=0, version=0).metrics
        assert algo == "online_dpo" or (metrics["policy/clip_fraction"] > 0) != on_policy
        return Found(metrics["policy/loss"], dict(gradient))

    return update


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_rloo(trl: dict[str, Any], paths: dict[str, str], ours: Ours, beta: float) -> None:
    """KL in the reward, leave-one-out baseline, one clipped ratio a response, mean over responses."""
    samples = batch()
    assert_agree(ours("rloo", samples, kl={"coef": beta}), theirs(trl, paths, "rloo", samples, beta=beta))


def test_rloo_counts_responses_without_a_reward(trl: dict[str, Any], paths: dict[str, str], ours: Ours) -> None:
    """Their baselines leave them out as ours do, but their mean over responses counts each as one without advantage."""
    samples = batch()
    samples[1].reward = samples[10].reward = None
    dropped = ours("rloo", samples, kl={"coef": 0.0})
    assert_agree(dropped * (10 / 12), theirs(trl, paths, "rloo", samples, beta=0.0))


@pytest.mark.parametrize(("loss_type", "mean"), [("bnpo", "token"), ("dapo", "token"), ("grpo", "sequence")])
@pytest.mark.parametrize("scale", [True, False])
def test_grpo(trl: dict[str, Any], paths: dict[str, str], ours: Ours, loss_type: str, mean: str, scale: bool) -> None:
    """Deviations of a sample (n - 1) plus 1e-4, k3 in the loss, clipped token ratios."""
    samples, scaling = batch(), "group" if scale else "none"
    got = ours("grpo", samples, grpo={"mean": mean, "scale_advantages": scale})
    assert_agree(got, theirs(trl, paths, "grpo", samples, **K3, loss_type=loss_type, scale_rewards=scaling))


def test_trl_multiplies_k3_by_the_ratio(trl: dict[str, Any], paths: dict[str, str], ours: Ours) -> None:
    """By default. On-policy that has the value of k3 and the gradient of the true KL, as our k1 and k2 have."""
    samples = batch()
    got = theirs(trl, paths, "grpo", samples, on_policy=True, beta=0.1, loss_type="bnpo", use_bias_correction_kl=True)
    k2, k3 = (ours("grpo", samples, on_policy=True, kl={"coef": 0.1, "estimator": name}) for name in ("k2", "k3"))
    assert_agree(Found(k3.loss, k2.gradient), got)


def test_dr_grpo_divides_by_a_constant(trl: dict[str, Any], paths: dict[str, str], ours: Ours) -> None:
    """By the longest possible response times the responses, where our mean divides by the tokens there are."""
    samples = batch()
    tokens = sum(len(one.response_ids) for one in samples)
    got = ours("grpo", samples, grpo={"scale_advantages": False}) * (tokens / (LONGEST * len(samples)))
    assert_agree(got, theirs(trl, paths, "grpo", samples, **K3, loss_type="dr_grpo", scale_rewards="none"))


def test_grpo_weighs_the_kl_of_off_policy_samples(trl: dict[str, Any], paths: dict[str, str], ours: Ours) -> None:
    """Both cap exp(old - behaviour), a token, at 2. It multiplies our KL term as well, their policy term alone."""
    samples, capped = batch(), {"off_policy": {"correction": True, "cap": 2.0}}
    arguments = {
        "loss_type": "bnpo",
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 2.0,
    }
    policy_term = ours("grpo", samples, kl={"coef": 0.0}, **capped)
    assert_agree(policy_term, theirs(trl, paths, "grpo", samples, sampler=True, beta=0.0, **arguments))
    plain_kl = ours("grpo", samples) + ours("grpo", samples, kl={"coef": 0.0}) * -1.0
    got = theirs(trl, paths, "grpo", samples, sampler=True, **K3, **arguments)
    assert_agree(policy_term + plain_kl, got)
    assert abs(ours("grpo", samples, **capped).loss - got.loss) > 1e-3


def halves(samples: Sequence[Sample]) -> list[Sample]:
    """Of pairs side by side all the first ones, then all the second ones."""
    return [*samples[0::2], *samples[1::2]]


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_online_dpo(trl: dict[str, Any], paths: dict[str, str], ours: Ours, loss: str) -> None:
    """Log-probabilities are summed, for IPO too. Theirs are those of temperature 1, whatever was sampled at."""
    samples = batch(size=2, groups=6)
    want = theirs(trl, paths, "online_dpo", halves(samples), beta=0.1, loss_type=loss)
    settings = {"loss": loss, "beta": 0.1}
    assert_agree(ours("online_dpo", samples, temperature=1.0, dpo=settings), want)
    assert abs(ours("online_dpo", samples, dpo=settings).loss - want.loss) > 1e-3


def test_online_dpo_trains_on_ties(trl: dict[str, Any], paths: dict[str, str], ours: Ours) -> None:
    """As if the first were the better one; we leave them out, of the mean too."""
    samples = batch(size=2, groups=6)
    samples[4].reward = samples[5].reward
    tied = theirs(trl, paths, "online_dpo", halves(samples), beta=0.1, loss_type="sigmoid")
    without = ours("online_dpo", samples, temperature=1.0)
    pair = ours("online_dpo", [dataclasses.replace(samples[4], reward=1.0), samples[5]], temperature=1.0)
    assert_agree(without * (5 / 6) + pair * (1 / 6), tied)
