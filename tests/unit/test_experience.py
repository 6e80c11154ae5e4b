"""What becomes of a rank's samples: which are trained on, and what is measured of them."""

import numpy as np
import pytest
import torch

from algorithms.base import Algorithm, Run
from algorithms.normalise import by_token
from algorithms.rollout import Objective, Rollout
from engine.config import Config
from engine.config.cli import validate
from engine.config.numerics import old_source
from engine.config.schema import config_with
from engine.machine.world import World
from engine.rollouts import experience, off_policy
from engine.sample import Sample
from kernels.coefficients import PolicySpec, Rows, row_coefficients


class Alone(World):
    """One rank without a process group."""

    def max(self, value: float) -> float:
        return value

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


ALONE = Alone(0, 1, torch.device("cpu"))


def config(**sections: object) -> Config:
    return validate({"data": {"task": "addition"}} | sections)


def sample(group: int, reward: float | None, version: int = 0) -> Sample:
    parts = {} if reward is None else {"score": reward}
    return Sample(0, group, [1], response_ids=[2], reward=reward, reward_parts=parts, policy_version=version)


@pytest.mark.parametrize(
    "algo,kept",
    [("ppo", [0, 0, 1, 2]), ("bok", [0, 0, 1, 2]), ("rloo", [0, 0]), ("grpo", [0, 0]), ("online_dpo", [0, 0])],
)
def test_dropped_samples_leave_groups_that_can_be_compared(algo: str, kept: list[int]) -> None:
    samples = [sample(0, 1.0), sample(0, 0.0), sample(1, None), sample(1, 1.0), sample(2, 0.5), sample(2, None)]
    assert [one.group_id for one in experience.usable(samples, config(algo=algo))] == kept


def test_held_out_metrics_by_prompt() -> None:
    """Mean over the scored responses; pass@k over prompts, a dropped response being no right one."""
    samples = [sample(0, 0.0), sample(0, 1.0), sample(1, 0.0), sample(1, 0.0), sample(2, None), sample(2, 1.0)]
    samples += [sample(3, None), sample(3, None)]  # says nothing of the policy
    settings = config(eval={"samples_per_prompt": 2, "temperature": 1.0})
    found = experience.held_out_metrics(samples, settings, ALONE)
    assert found == {
        "eval/accuracy": pytest.approx(2 / 5),
        "eval/accuracy_stderr": pytest.approx(np.std([0.5, 0, 1], ddof=1) / 3**0.5),
        "eval/pass@2": pytest.approx(2 / 3),
        "eval/pass@2_stderr": pytest.approx(np.std([1, 0, 1], ddof=1) / 3**0.5),
    }
    assert experience.held_out_metrics(samples[:2], settings, ALONE).keys() == {"eval/accuracy", "eval/pass@2"}
    assert experience.held_out_metrics(samples[-2:], settings, ALONE) == {}, "no score, and not 0"


def test_off_policy_metrics_by_hand() -> None:
    """Ratios are those before the cap, and clamped as in the kernels."""
    samples = [sample(0, 1.0, version=3), sample(0, 1.0, version=4)]
    old, behaviour = torch.tensor([-1.0, -2.0, -1.0]), torch.tensor([-1.0, -3.0, -31.0])
    found = off_policy.metrics(config(schedule={"staleness": 1}), samples, old, behaviour, 5, ALONE)
    ratios = [1.0, float(np.exp(1.0)), float(np.exp(20.0))]
    assert found["off_policy/staleness"] == 1.5
    assert found["off_policy/ratio_mean"] == pytest.approx(sum(ratios) / 3)
    assert found["off_policy/ratio_max"] == pytest.approx(ratios[2])
    assert found["off_policy/capped_fraction"] == pytest.approx(2 / 3)
    of_pairs = config(algo="online_dpo", schedule={"staleness": 1})
    assert off_policy.metrics(of_pairs, samples, old, behaviour, 5, ALONE) == {"off_policy/staleness": 1.5}


def test_off_policy_metrics_are_of_the_weights_that_the_loss_uses() -> None:
    """One a response with RLOO's sequence ratio: the product over its tokens; with GSPO's their geometric mean; none
    where the loss has none."""
    samples = [Sample(0, 0, [1], response_ids=[2] * n, reward=1.0, policy_version=0) for n in (4, 2, 1)]
    behaviour = -torch.rand(7) - 1
    old = behaviour + torch.tensor([0.3] * 4 + [-0.2] * 2 + [0.5])
    stale = {"schedule": {"staleness": 1}}
    ratios = np.exp([1.2, -0.4, 0.5])
    found = off_policy.metrics(config(algo="rloo", **stale), samples, old, behaviour, 0, ALONE)
    assert found["off_policy/ratio_mean"] == pytest.approx(ratios.mean(), rel=1e-5)
    assert found["off_policy/ratio_max"] == pytest.approx(ratios.max(), rel=1e-5)
    assert found["off_policy/capped_fraction"] == pytest.approx(1 / 3)
    sums = torch.stack([part.sum() for part in (old - behaviour).split([4, 2, 1])])
    spec = PolicySpec("clip", 0.2, 0.2, 0.0, "k3", 0.0, 2.0, "sequence")
    rows = Rows(torch.ones(7).bool(), torch.ones(7), -torch.ones(7), old, None, behaviour, torch.tensor([4, 2, 1]))
    losses = row_coefficients(spec, old, torch.zeros(7), rows).loss[[0, 4, 6]]
    torch.testing.assert_close(losses, sums.exp().clamp(max=2.0), msg="of an advantage of -1 and the ratio 1")
    by_token = config(algo="rloo", rloo={"ratio": "token"}, **stale)
    found = off_policy.metrics(by_token, samples, old, behaviour, 0, ALONE)
    assert found["off_policy/ratio_mean"] == pytest.approx(np.exp([0.3] * 4 + [-0.2] * 2 + [0.5]).mean(), rel=1e-5)
    by_mean = config(algo="grpo", grpo={"ratio": "sequence_mean"}, **stale)
    found = off_policy.metrics(by_mean, samples, old, behaviour, 0, ALONE)
    assert found["off_policy/ratio_mean"] == pytest.approx(np.exp([0.3, -0.2, 0.5]).mean(), rel=1e-5)
    off = config(algo="rloo", model={"dtype": "bfloat16"}, off_policy={"correction": False})
    assert off_policy.metrics(off, samples, old, behaviour, 0, ALONE) == {"off_policy/staleness": 0.0}


def test_a_batch_without_responses_has_no_metrics() -> None:
    settings, nothing = config(algo="ppo", schedule={"staleness": 1}), torch.empty(0)
    rollout = experience.rollout([], nothing, nothing, nothing, nothing)
    assert experience.metrics([], rollout, ALONE, verified=True) == {}
    assert off_policy.metrics(settings, [], nothing, nothing, 1, ALONE) == {}
    objective = experience.objective(settings, rollout, 0.1, ALONE)
    assert len(objective.units) == 0 and objective.metrics == {}


@pytest.mark.parametrize(
    "changes,needle",
    [
        ({"units": torch.tensor([[0, 1]])}, "units of 2 responses, and its record says rows = 'single'"),
        ({"returns": torch.zeros(2)}, "its record says value_model = False"),
        ({"loss": {"loss": "reinforce", "kl_coef": 0.1}}, "must say kl = 'loss' or reference = True"),
        ({"loss": {"loss": "clip"}}, "must say policy_ratio = True"),
        (
            {"loss": {"loss": "reinforce", "ratio": "sequence"}},
            "has a sequence ratio, and its method ratio says",
        ),
    ],
)
def test_an_objective_that_its_record_does_not_provide_for(changes: dict[str, object], needle: str) -> None:
    given = {"units": torch.tensor([[0], [1]]), "normalise": by_token, "loss": {"loss": "likelihood"}} | changes

    class Careless(Algorithm):
        name = "careless"

        def objective(self, rollout: Rollout, settings: None, run: Run) -> Objective:
            return Objective(**given)  # type: ignore[arg-type]

    settings = config_with("of:Mine", Careless()).model_validate({"algo": "of:Mine"})
    samples = [sample(0, 1.0), sample(0, 0.0)]
    with pytest.raises(ValueError, match=f"careless: the objective .*{needle}"):
        experience.objective(settings, experience.rollout(samples, None, None, None, None), 0.1, ALONE)


@pytest.mark.parametrize("algo", ["ppo", "rloo", "grpo", "online_dpo", "bok"])
@pytest.mark.parametrize(
    "elsewhere",
    [{"schedule": {"staleness": 1}}, {"generation": {"backend": "vllm"}}, {"model": {"dtype": "bfloat16"}}, {}],
)
@pytest.mark.parametrize("steps", [{"minibatches_per_batch": 1}, {"minibatches_per_batch": 2}, {"epochs_per_batch": 2}])
@pytest.mark.parametrize("coef", [0.0, 0.1])
def test_a_pass_for_old_is_made_where_nothing_else_gives_it(
    algo: str, coef: float, steps: dict[str, int], elsewhere: dict[str, object]
) -> None:
    """One optimizer step gives it by its own passes, unless it is in the rewards; without a ratio nothing needs it."""
    one = config(algo=algo, kl={"coef": coef}, train=steps, **elsewhere)
    several, penalised = steps != {"minibatches_per_batch": 1}, algo in ("ppo", "rloo") and coef > 0
    has_ratio = algo in ("ppo", "rloo", "grpo")
    assert (old_source(one) == "sampler") == (not has_ratio or (not several and not elsewhere))
    assert (old_source(one) == "pass") == (has_ratio and (several or (penalised and bool(elsewhere))))


@pytest.mark.parametrize("algo", ["ppo", "rloo", "grpo", "online_dpo", "bok"])
def test_correction_follows_staleness_and_numerics(algo: str) -> None:
    """On by default where samples are not the policy's own, for losses of a ratio; off where it was turned off."""
    has_ratio = algo in ("ppo", "rloo", "grpo")
    assert not off_policy.corrects(config(algo=algo))
    for elsewhere in (
        {"schedule": {"staleness": 1}},
        {"generation": {"backend": "vllm"}},
        {"model": {"dtype": "bfloat16"}},
    ):
        assert off_policy.corrects(config(algo=algo, **elsewhere)) == has_ratio
    off = config(algo=algo, generation={"backend": "vllm"}, off_policy={"correction": False})
    assert not off_policy.corrects(off)
