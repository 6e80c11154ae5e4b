"""Which metrics are shown, under which names and in which units: one list for the page and the pictures."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.report.format import number, percent

PHASES = ("generate", "wait", "sleep", "offload", "reward", "old", "ref", "value", "train", "sync", "eval", "save")


@dataclass(frozen=True)
class Curve:
    """One chart. ``metrics`` maps the legend's words to metric names.

    Values below ``low`` are drawn at it; ``exact`` ones have no noise to smooth away.
    """

    title: str
    note: str
    metrics: dict[str, str]
    show: Callable[[float], str] = number
    from_zero: bool = False
    low: float | None = None
    exact: bool = False


CURVES = (
    Curve(
        "Accuracy",
        "Share of responses that are right: while training (sampled), and on held-out prompts. Of a reward model the "
        "share of pairs that it scores in the data's order.",
        {"train": "reward/accuracy", "held-out": "eval/accuracy", "train, pairs": "reward_model/accuracy"},
        percent,
        from_zero=True,
    ),
    Curve(
        "Reward",
        "Mean score of a response, before any KL penalty.",
        {"train": "reward/mean", "held-out": "eval/reward"},
    ),
    Curve("KL to the reference", "How far the policy has moved from where it started.", {"KL": "kl/ref_mean"}),
    Curve(
        "Entropy",
        "Nats a token. A fall to zero means that the policy has stopped exploring.",
        {"entropy": "policy/entropy"},
        from_zero=True,
    ),
    Curve(
        "Loss",
        "The surrogate objective, whose level says little and whose jumps say a lot; of rows what is to be minimised.",
        {"loss": "policy/loss", "held-out": "eval/loss", "reward model": "reward_model/loss"},
    ),
    Curve(
        "Perplexity",
        "exp of the held-out loss: among how many tokens it is as if to choose.",
        {"held-out": "eval/perplexity"},
    ),
    Curve(
        "Tokens right",
        "Share of the held-out tokens that are the policy's most likely ones.",
        {"held-out": "eval/token_accuracy"},
        percent,
        from_zero=True,
    ),
    Curve(
        "Clip fraction",
        "Share whose probability ratio left the trust region and got no gradient.",
        {"clipped": "policy/clip_fraction"},
        percent,
        from_zero=True,
    ),
    Curve(
        "Probability ratio",
        "New to old policy, mean. Close to 1 when the data is fresh.",
        {"ratio": "policy/ratio_mean"},
    ),
    Curve(
        "Rewards of pairs",
        "DPO's implicit rewards, beta times the log-ratio to the reference, of chosen and rejected responses.",
        {"chosen": "policy/chosen_reward", "rejected": "policy/rejected_reward", "held-out margin": "eval/margin"},
    ),
    Curve(
        "Scores of pairs",
        "A reward model's: how far those of chosen responses are above those of rejected ones, and the mean of both.",
        {
            "margin": "reward_model/reward_margin",
            "mean": "reward_model/reward_mean",
            "held-out margin": "eval/reward_margin",
        },
    ),
    Curve(
        "Pairs told apart",
        "Share of pairs whose chosen response the policy prefers; share of groups without a pair, all scores the same.",
        {"told apart": "policy/pair_accuracy", "held-out": "eval/pair_accuracy", "tied": "online_dpo/tied_fraction"},
        percent,
        from_zero=True,
    ),
    Curve(
        "Staleness",
        "Updates between the policy that sampled and the one that is trained.",
        {"updates": "off_policy/staleness"},
        from_zero=True,
        exact=True,
    ),
    Curve(
        "Off-policy ratio",
        "Trained to sampling policy before the update, mean over tokens, and the share cut at the cap.",
        {"ratio": "off_policy/ratio_mean", "capped": "off_policy/capped_fraction"},
    ),
    Curve(
        "Idle",
        "Share of the time with nothing to do: the trainer waits for a batch, the sampler for weights.",
        {"trainer": "idle/train", "sampler": "idle/generate"},
        percent,
        from_zero=True,
    ),
    Curve("Value loss", "Error of the value model against the returns.", {"loss": "value/loss"}, from_zero=True),
    Curve(
        "Value explained variance",
        "1: the value model predicts the returns; 0: no better than their mean. Below -1 drawn at -1.",
        {"explained": "value/explained_variance"},
        low=-1.0,
    ),
    Curve(
        "Gradient norm",
        "Before clipping.",
        {"policy": "policy/grad_norm", "value": "value/grad_norm", "reward model": "reward_model/grad_norm"},
        from_zero=True,
    ),
    Curve("Response length", "Mean tokens a response.", {"tokens": "rollout/response_tokens_mean"}, from_zero=True),
    Curve(
        "Stopped by itself",
        "Share of responses that ended with the end token rather than at the length limit.",
        {"stopped": "rollout/stopped_fraction"},
        percent,
        from_zero=True,
    ),
    Curve("Tokens a second", "Over the whole step.", {"tokens/s": "tokens_per_second"}, from_zero=True),
    Curve(
        "Sampler against trainer",
        "Nats between their log-probabilities of the same tokens, before the update: mean and 99.9th percentile. "
        "A jump means that they do not hold the same weights.",
        {"mean": "weights/logprob_gap_mean", "99.9 %": "weights/logprob_gap_p999"},
        from_zero=True,
        exact=True,
    ),
    Curve(
        "Peak memory",
        "GiB, on the fullest GPU (or the process, on a CPU).",
        {"GiB": "memory/peak_gib"},
        from_zero=True,
        exact=True,
    ),
    Curve(
        "Memory by phase",
        "GiB at the peak of sampling and of training, and between them with the sampler asleep, which must not grow.",
        {"sampling": "memory/generate_gib", "training": "memory/train_gib", "asleep": "memory/asleep_gib"},
        from_zero=True,
        exact=True,
    ),
    Curve(
        "Plan error",
        "How far a phase's peak memory is above what the memory plan predicted, or below it.",
        {"sampling": "memory/plan_error_generate", "training": "memory/plan_error_train"},
        percent,
        exact=True,
    ),
    Curve(
        "Learning rate",
        "Of the policy, or the reward model.",
        {"rate": "policy/lr", "reward model": "reward_model/lr"},
        from_zero=True,
        exact=True,
    ),
)

NO_PHASES = ("time/step", "time/digest")
"""The whole step, and a part of the phase ``sync``."""
PHASE_TITLE = "Seconds a step, by phase"
PHASE_NOTE = "Where the trainer's time goes. To wait for a batch is its only part in one that is sampled elsewhere."


def phases_in(names: list[str]) -> list[str]:
    """The phases that have a ``time/…`` metric among ``names``, in the order of a step; unknown ones come last."""
    timed = [name.removeprefix("time/") for name in names if name.startswith("time/") and name not in NO_PHASES]
    return [phase for phase in PHASES if phase in timed] + [phase for phase in timed if phase not in PHASES]


def stderr_of(name: str) -> str:
    """The metric with the standard error of another one."""
    return f"{name}_stderr"


def other_metrics(names: list[str]) -> list[str]:
    """The metrics that no curve shows, in the order given; a standard error is part of its metric's curve."""
    shown = {metric for curve in CURVES for metric in curve.metrics.values()} | {stderr_of(name) for name in names}
    return [name for name in names if name not in shown and not name.startswith("time/")]
