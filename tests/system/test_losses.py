"""Losses and gradients of three prompts against plain formulas on transformers' own log-probabilities, in fp64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from engine.machine.world import joined
from engine.sample import Sample
from tests.system.updates import TEMPERATURE, Updates, batch, drift

SCORES = [0.1, 0.9, 0.9, 0.3, 0.5, 0.5, 0.5, 0.5, 1.0, -1.0, -1.0, 0.0]
"""The best is there twice, all are the same, the worst is there twice."""


class Oracle:
    """Every response's log-probabilities by the trained and the reference model, [tokens] fp64, one pass each."""

    def __init__(self, path: str, updates: Updates, samples: Sequence[Sample]) -> None:
        self.updates, self.samples = updates, samples
        self.policy, self.reference = (AutoModelForCausalLM.from_pretrained(path).double() for _ in range(2))
        self.reference.load_state_dict(updates.trainer.reference.module.model.state_dict())
        self.new = [self._logprobs(self.policy, one) for one in samples]
        self.ref = [self._logprobs(self.reference, one).detach() for one in samples]
        self.old = [new.detach() + drift(one) for new, one in zip(self.new, samples, strict=True)]
        self.behaviour = [torch.from_numpy(one.behaviour_logprobs).double() for one in samples]
        self.lengths = [len(one.response_ids) for one in samples]

    @staticmethod
    def _logprobs(model: Any, sample: Sample) -> Tensor:
        logits = model(torch.tensor([sample.prompt_ids + sample.response_ids])).logits[
            0, len(sample.prompt_ids) - 1 : -1
        ]
        return (logits / TEMPERATURE).log_softmax(-1).gather(-1, torch.tensor(sample.response_ids)[:, None])[:, 0]

    def margin(self, chosen: int, rejected: int) -> Tensor:
        """How much further the policy than the reference tells chosen from rejected."""
        above = [self.new[i].sum() - self.ref[i].sum() for i in (chosen, rejected)]
        return above[0] - above[1]

    def clipped(self, advantages: Sequence[Tensor | float]) -> list[Tensor]:
        """Of each response the clipped loss of its tokens, each with a ratio and an importance weight of its own."""
        losses = []
        for new, old, behaviour, advantage in zip(self.new, self.old, self.behaviour, advantages, strict=True):
            ratio = (new - old).exp()
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            losses.append(-(old - behaviour).exp().clamp(max=2.0) * surrogate)
        return losses

    def k3(self) -> list[Tensor]:
        return [(ref - new).exp() - 1 - (ref - new) for new, ref in zip(self.new, self.ref, strict=True)]


@pytest.fixture(scope="module")
def update(tiny_model: str) -> Iterator[Updates]:
    with joined("cpu", 5) as world:
        yield Updates(tiny_model, world)


@pytest.fixture
def check(update: Updates, tiny_model: str) -> Callable[..., dict[str, float]]:
    def check(
        algo: str, expected: Callable[[Oracle], Tensor], samples: Sequence[Sample] | None = None, **sections: dict
    ) -> dict[str, float]:
        """Compares loss and gradient of the policy with the expected loss's, and gives the update's metrics."""
        if samples is None:
            samples = batch()
            for one, score in zip(samples, SCORES, strict=True):
                one.reward = score
        oracle = Oracle(tiny_model, update, samples)
        loss = expected(oracle)
        loss.backward()
        got = update(algo, samples, **sections)
        assert got.metrics["policy/loss"] == pytest.approx(loss.item(), rel=5e-5, abs=1e-6)
        want = {f"model.{name}": parameter.grad for name, parameter in oracle.policy.named_parameters()}
        assert got.gradients["policy"].keys() == want.keys()
        whole = torch.cat([want[name].flatten() for name in got.gradients["policy"]])
        found = torch.cat([gradient.flatten() for gradient in got.gradients["policy"].values()])
        assert float((found - whole).norm() / whole.norm()) < 1e-5
        return got.metrics

    return check


DPO = {
    "sigmoid": ({"loss": "sigmoid", "beta": 0.1}, lambda margin: -logsigmoid(0.1 * margin)),
    "smoothed": (
        {"loss": "sigmoid", "beta": 0.3, "label_smoothing": 0.2},
        lambda margin: -0.8 * logsigmoid(0.3 * margin) - 0.2 * logsigmoid(-0.3 * margin),
    ),
    "ipo": ({"loss": "ipo", "beta": 0.2}, lambda margin: (margin - 2.5) ** 2),
    "hinge": ({"loss": "hinge", "beta": 0.05}, lambda margin: (1 - 0.05 * margin).clamp(min=0)),
}


@pytest.mark.parametrize("kind", DPO)
def test_online_dpo(check: Callable[..., dict[str, float]], kind: str) -> None:
    """Of four responses to three prompts two pairs: 1 against 0, 8 against 9; the tied group makes none."""
    settings, loss = DPO[kind]
    margins = []

    def expected(oracle: Oracle) -> Tensor:
        pairs = [oracle.margin(1, 0), oracle.margin(8, 9)]
        margins.extend(pair.item() for pair in pairs)
        return (loss(pairs[0]) + loss(pairs[1])) / 2

    metrics = check("online_dpo", expected, dpo=settings)
    assert metrics["online_dpo/tied_fraction"] == pytest.approx(1 / 3)
    assert metrics["policy/pair_accuracy"] == sum(margin > 0 for margin in margins) / 2
    difference = metrics["policy/chosen_reward"] - metrics["policy/rejected_reward"]
    assert difference == pytest.approx(settings["beta"] * sum(margins) / 2, rel=1e-4)


def test_online_dpo_of_two_responses(check: Callable[..., dict[str, float]]) -> None:
    samples = batch(size=2)
    for one, score in zip(samples, [0.0, 1.0, 1.0, 1.0, 3.0, 2.0], strict=True):
        one.reward = score

    def expected(oracle: Oracle) -> Tensor:
        return -(logsigmoid(0.1 * oracle.margin(1, 0)) + logsigmoid(0.1 * oracle.margin(4, 5))) / 2

    assert check("online_dpo", expected, samples)["online_dpo/tied_fraction"] == pytest.approx(1 / 3)


def test_bok(check: Callable[..., dict[str, float]]) -> None:
    """The mean over the tokens of responses 1, 4 and 8 alone; where all are equally good the first is learned."""

    def expected(oracle: Oracle) -> Tensor:
        return -torch.cat([oracle.new[i] for i in (1, 4, 8)]).mean()

    metrics = check("bok", expected)
    assert metrics["bok/best_score"] == pytest.approx((0.9 + 0.5 + 1.0) / 3)
    assert metrics["bok/tied_fraction"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("ratio", ["sequence", "token"])
def test_rloo(check: Callable[..., dict[str, float]], ratio: str) -> None:
    def expected(oracle: Oracle) -> Tensor:
        returns = [
            score - 0.1 * float((old - ref).sum())
            for score, old, ref in zip(SCORES, oracle.old, oracle.ref, strict=True)
        ]
        groups = [range(i - i % 4, i - i % 4 + 4) for i in range(12)]
        advantages = [returns[i] - sum(returns[j] for j in groups[i] if j != i) / 3 for i in range(12)]
        if ratio == "token":
            return torch.cat(oracle.clipped(advantages)).mean()
        losses = []
        for i in range(12):
            whole = (oracle.new[i] - oracle.old[i]).sum().exp()
            weight = (oracle.old[i] - oracle.behaviour[i]).sum().exp().clamp(max=2.0)
            losses.append(-weight * torch.minimum(whole * advantages[i], whole.clamp(0.8, 1.2) * advantages[i]))
        return sum(losses) / 12

    metrics = check("rloo", expected, rloo={"ratio": ratio})
    assert metrics["policy/clip_fraction"] > 0


@pytest.mark.parametrize("mean", ["token", "sequence"])
@pytest.mark.parametrize("scale", [True, False])
def test_grpo(check: Callable[..., dict[str, float]], mean: str, scale: bool) -> None:
    def expected(oracle: Oracle) -> Tensor:
        groups = torch.tensor(SCORES, dtype=torch.float64).view(3, 4)
        advantages = groups - groups.mean(1, keepdim=True)
        if scale:
            advantages = advantages / (groups.std(1, keepdim=True) + 1e-4)
        importance = [(old - b).exp().clamp(max=2.0) for old, b in zip(oracle.old, oracle.behaviour, strict=True)]
        policy = oracle.clipped(advantages.flatten().tolist())
        losses = [p + 0.1 * weight * kl for p, weight, kl in zip(policy, importance, oracle.k3(), strict=True)]
        return torch.cat(losses).mean() if mean == "token" else sum(loss.mean() for loss in losses) / 12

    metrics = check("grpo", expected, grpo={"mean": mean, "scale_advantages": scale})
    assert metrics["grpo/zero_advantage_fraction"] == pytest.approx(4 / 12)
    assert metrics["policy/clip_fraction"] > 0


def test_dr_grpo(check: Callable[..., dict[str, float]]) -> None:
    """Liu et al. 2025: neither a standard deviation nor a response's length divides, but the longest a response may be.

    The mean is over groups and their responses, of sums over tokens, in whatever microbatches they are.
    """

    def expected(oracle: Oracle) -> Tensor:
        groups = torch.tensor(SCORES, dtype=torch.float64).view(3, 4)
        advantages = groups - groups.mean(1, keepdim=True)
        sums = torch.stack([loss.sum() for loss in oracle.clipped(advantages.flatten().tolist())])
        return (sums / 11).view(3, 4).mean(1).mean()

    settings = {"mean": "constant", "scale_advantages": False}
    check("grpo", expected, grpo=settings, kl={"coef": 0.0}, rollout={"max_response_tokens": 11})


def scaled_advantages() -> Tensor:
    """[12] fp64, GRPO's."""
    groups = torch.tensor(SCORES, dtype=torch.float64).view(3, 4)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def test_gspo(check: Callable[..., dict[str, float]]) -> None:
    """Zheng et al. 2025, eq. 5 and 7: one clipped ratio a response, the geometric mean over its tokens."""

    def expected(oracle: Oracle) -> Tensor:
        losses = []
        for new, old, behaviour, advantage in zip(
            oracle.new, oracle.old, oracle.behaviour, scaled_advantages(), strict=True
        ):
            ratio, weight = (new - old).mean().exp(), (old - behaviour).mean().exp().clamp(max=2.0)
            losses.append(-weight * torch.minimum(ratio * advantage, ratio.clamp(0.99, 1.01) * advantage))
        return torch.stack(losses).mean()

    clip = {"clip_low": 0.01, "clip_high": 0.01}
    metrics = check("grpo", expected, grpo={"ratio": "sequence_mean", "mean": "sequence"}, kl={"coef": 0.0}, train=clip)
    assert 0 < metrics["policy/clip_fraction"] < 1


def test_cispo(check: Callable[..., dict[str, float]]) -> None:
    """MiniMax 2025, eq. 4 and 5: the clipped ratio is a constant weight of the log-probability's gradient."""

    def expected(oracle: Oracle) -> Tensor:
        losses = []
        for new, old, behaviour, advantage in zip(
            oracle.new, oracle.old, oracle.behaviour, scaled_advantages(), strict=True
        ):
            weight = (new - old).exp().clamp(0.8, 1.2).detach() * (old - behaviour).exp().clamp(max=2.0)
            losses.append(-weight * advantage * new)
        return torch.cat(losses).mean()

    metrics = check("grpo", expected, grpo={"loss": "cispo"}, kl={"coef": 0.0})
    assert metrics["policy/clip_fraction"] > 0


def test_dual_clip(check: Callable[..., dict[str, float]]) -> None:
    """Ye et al. 2020, eq. 5: with a negative advantage A a token's loss is at most -A times the bound."""

    def expected(oracle: Oracle) -> Tensor:
        losses = []
        for new, old, behaviour, advantage in zip(
            oracle.new, oracle.old, oracle.behaviour, scaled_advantages(), strict=True
        ):
            ratio = (new - old).exp()
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            if advantage < 0:
                surrogate = surrogate.clamp(min=1.05 * advantage)
            losses.append(-(old - behaviour).exp().clamp(max=2.0) * surrogate)
        return torch.cat(losses).mean()

    metrics = check("grpo", expected, grpo={"dual_clip": 1.05}, kl={"coef": 0.0})
    plain = check("grpo", lambda oracle: torch.cat(oracle.clipped(scaled_advantages())).mean(), kl={"coef": 0.0})
    assert metrics["policy/clip_fraction"] > plain["policy/clip_fraction"]


def test_ppo(check: Callable[..., dict[str, float]], update: Updates) -> None:
    """KL at every token, the score at the last one, the value after a response that was cut off; then whitened."""
    gamma, lam, expected_value_loss = 0.9, 0.8, []

    def expected(oracle: Oracle) -> Tensor:
        update.trainer.value = update.value
        before, after = update.trainer.values(oracle.samples)
        advantages, errors = [], []
        for i, values in enumerate(before.double().split(oracle.lengths)):
            sample, length = oracle.samples[i], oracle.lengths[i]
            rewards = -0.1 * (oracle.old[i] - oracle.ref[i])
            rewards[-1] += SCORES[i]
            end = float(after[i]) if sample.finish_reason == "length" else 0.0
            following = [*values.tolist()[1:], end]
            deltas = [float(rewards[t]) + gamma * following[t] - float(values[t]) for t in range(length)]
            advantage = torch.tensor(
                [sum((gamma * lam) ** (s - t) * deltas[s] for s in range(t, length)) for t in range(length)],
                dtype=torch.float64,
            )
            # the estimates used to lie 0.1 lower, within the clip range
            errors.append(0.5 * advantage.square())
            advantages.append(advantage)
        expected_value_loss.append(float(torch.cat(errors).mean()))
        flat = torch.cat(advantages)
        flat = (flat - flat.mean()) / flat.std(correction=0)
        return torch.cat(oracle.clipped(flat.split(oracle.lengths))).mean()

    metrics = check("ppo", expected, ppo={"gamma": gamma, "lam": lam})
    assert metrics["policy/clip_fraction"] > 0
    assert metrics["value/loss"] == pytest.approx(expected_value_loss[0], rel=1e-4)
