"""Goes from random weights to a judged policy on the embedded task, on a CPU: make pipeline.

Supervised fine-tuning, a gold reward model, pairs that it puts in order, a proxy reward model that learns from these,
online DPO against the proxy, and an evaluation by the gold one, each by the command that a user would type. Every
stage has a floor that its result has to reach; one that does not, or fails, ends the pipeline with exit status 1. All
that a stage prints is in FOLDER/logs, all that it makes in FOLDER.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.tasks import addition

SFT_ACCURACY = 0.2
"""Held-out problems that the supervised policy has to answer rightly, greedily."""
REWARD_MODEL_ACCURACY = 0.75
"""Held-out pairs that a reward model has to order as they are given."""
RELABELLED_ACCURACY = 0.7
"""Pairs with one right answer that the gold model has to put first."""
STANDARD_ERRORS = 3
"""How far the gold win rate over the supervised policy has to be above one half."""
CHECKPOINTS = 5
"""Policies that training leaves on its way, besides where it began, which the picture has to show."""


class TooLow(Exception):
    """A stage's result is below its floor."""


@dataclass(frozen=True)
class Stage:
    """A command, and what its result has to be.

    Args:
        name: also of the file of what the command prints.
        purpose: in a few words.
        command: arguments of Python.
        check: says the result in a few words, or raises TooLow.
    """

    name: str
    purpose: str
    command: list[str]
    check: Callable[[], str]


def at_least(value: float, floor: float, what: str) -> str:
    """What was reached and what had to be, in percent.

    Raises:
        TooLow: the value is below the floor.
    """
    said = f"{what} {value:.1%}, floor {floor:.1%}"
    if value < floor:
        raise TooLow(said)
    return said


def read(path: Path) -> Any:
    """A JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def rows(path: Path) -> list[Any]:
    """A JSON-lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def reward_model_result(folder: Path) -> str:
    """Of a run of ``--algo reward_model``."""
    return at_least(read(folder / "summary.json")["accuracy_after"], REWARD_MODEL_ACCURACY, "held-out accuracy")


def relabelled_result(path: Path) -> str:
    """How often the right one of two answers comes first. Pairs of two wrong ones say nothing about it."""
    verified = [row for row in rows(path) if row["answer"] in (row["chosen"], row["rejected"])]
    if not verified:
        raise TooLow("no pair has a right answer")
    share = sum(row["chosen"] == row["answer"] for row in verified) / len(verified)
    return at_least(share, RELABELLED_ACCURACY, f"right answers that come first, of {len(verified)},")


def policy_result(folder: Path) -> str:
    """The reward of a run of an algorithm that samples has to rise by three standard errors."""
    summary = read(folder / "summary.json")
    before, after, error = (summary[f"reward_{which}"] for which in ("before", "after", "after_stderr"))
    said = f"the proxy's mean held-out score {before:.2f} -> {after:.2f} (+/- {error:.2f})"
    if after - before < STANDARD_ERRORS * error:
        raise TooLow(said)
    return said


def evaluation_result(folder: Path) -> str:
    """The last policy's win rate, and that there is a picture of enough of them."""
    models = read(folder / "evaluation.json")["models"]
    steps = [model for model in models if model["step"]]
    if len(steps) < CHECKPOINTS or not (folder / "win-rate-kl.svg").exists():
        raise TooLow(f"the picture shows {len(steps)} checkpoints of at least {CHECKPOINTS}")
    last = next(model["figures"]["win_rate"] for model in models if model["name"] == "model")
    said = at_least(last["value"], 0.5 + STANDARD_ERRORS * last["stderr"], "gold win rate over the supervised policy")
    before, after = (right_answers(folder / "responses" / f"{name}.jsonl") for name in ("base", "model"))
    return f"{said}; right answers by the verifier, which nobody has asked, {before:.1%} -> {after:.1%}"


def right_answers(path: Path) -> float:
    """The share of responses that the verifier finds right: how far the gold model's verdict is to be believed."""
    responses = rows(path)
    scores = addition.verify([row["response"] for row in responses], [row["answer"] for row in responses])
    return sum(scores) / len(scores)


def stages(folder: Path) -> list[Stage]:
    """All of them, in order."""
    run, generate, relabel, evaluate = (["-m", f"engine.{name}"] for name in ("run", "generate", "relabel", "evaluate"))
    sft, gold, proxy, policy = (folder / name for name in ("sft", "gold", "proxy", "online_dpo"))
    responses, verified, sampled = (folder / f"{name}.jsonl" for name in ("responses", "gold-pairs", "pairs"))
    relabelled, greedy = folder / "relabelled.jsonl", folder / "sft-greedy"
    task = ["--data.task", "addition", "--rollout.max_response_tokens", str(addition.MAX_RESPONSE_TOKENS)]

    def named(run_folder: Path) -> list[str]:
        return ["--output_dir", str(folder), "--name", run_folder.name]

    def reward_model(name: Path, pairs: Path, steps: int) -> list[str]:
        settings = [
            *("--data.path", str(pairs), "--data.eval_fraction", "0.1", "--data.max_row_tokens", "13"),
            *("--train.steps", str(steps), "--train.rows_per_step", "128", "--train.learning_rate", "7e-4"),
            *("--train.schedule", "cosine", "--train.warmup_steps", "10", "--train.tokens_per_microbatch", "4096"),
            *("--eval.every_steps", "40"),
        ]
        return [*run, "--algo", "reward_model", "--model.path", str(sft / "model"), *settings, *named(name)]

    return [
        Stage(
            "sft",
            "supervised fine-tuning from random weights on worked problems",
            [*run, "--config", "configs/quickstart-rows.yaml", "--train.steps", "250", *named(sft)],
            lambda: "held-out loss {loss_before:.2f} -> {loss_after:.2f}".format_map(read(sft / "summary.json")),
        ),
        Stage(
            "sft-greedy",
            "how many held-out problems it answers rightly",
            [
                *(*evaluate, str(sft / "model"), *task, "--generation.temperature", "0", "--limit", "1024"),
                *("--output", str(greedy)),
            ],
            lambda: at_least(
                read(greedy / "evaluation.json")["models"][0]["figures"]["accuracy"]["value"],
                SFT_ACCURACY,
                "greedy accuracy",
            ),
        ),
        Stage(
            "responses",
            "four responses to each problem that is not held out",
            [
                *(*generate, str(sft / "model"), *task, "--prompts", "train", "--rollout.samples_per_prompt", "4"),
                *("--generation.temperature", "1.5", "--output", str(responses)),
            ],
            lambda: f"{len(rows(responses))} responses",
        ),
        Stage(
            "pairs",
            "the verifier's pairs for the gold model, and pairs in no order",
            [
                *("-m", "scripts.addition_pairs", str(responses)),
                *("--verified", str(verified), "--sampled", str(sampled)),
            ],
            lambda: f"{len(rows(verified))} and {len(rows(sampled))} pairs",
        ),
        Stage(
            "gold",
            "the gold reward model, on the verifier's pairs",
            reward_model(gold, verified, 300),
            lambda: reward_model_result(gold),
        ),
        Stage(
            "relabel",
            "the gold model puts the other pairs in order",
            [
                *(*relabel, "--data.path", str(sampled), "--reward.model", str(gold / "model")),
                *("--output", str(relabelled)),
            ],
            lambda: relabelled_result(relabelled),
        ),
        Stage(
            "proxy",
            "the proxy reward model, on the relabelled pairs",
            reward_model(proxy, relabelled, 240),
            lambda: reward_model_result(proxy),
        ),
        Stage(
            "online_dpo",
            "online DPO from the supervised policy, against the proxy",
            [
                *(*run, "--config", "configs/quickstart.yaml", "--algo", "online_dpo"),
                *("--model.path", str(sft / "model"), "--reward.model", str(proxy / "model")),
                *("--dpo.beta", "0.5", "--train.steps", "60", "--train.learning_rate", "1e-4"),
                *("--save.hf_every_steps", "10"),
                *named(policy),
            ],
            lambda: policy_result(policy),
        ),
        Stage(
            "evaluate",
            "the gold model judges every checkpoint against the supervised policy",
            [*evaluate, str(policy), "--reward.model", str(gold / "model"), "--limit", "512"],
            lambda: evaluation_result(policy / "evaluation"),
        ),
    ]


def go_through(folder: Path) -> None:
    """Runs all stages.

    Raises:
        TooLow: a result is below its floor.
        subprocess.CalledProcessError: a command fails; the end of what it printed has been shown.
    """
    logs = folder / "logs"
    logs.mkdir(parents=True)
    plan = stages(folder)
    begun = time.monotonic()
    for number, stage in enumerate(plan, 1):
        print(f"\n[{number}/{len(plan)}] {stage.name}: {stage.purpose}\n  python {' '.join(stage.command)}", flush=True)
        log, started = logs / f"{stage.name}.txt", time.monotonic()
        with open(log, "w", encoding="utf-8") as file:
            done = subprocess.run([sys.executable, *stage.command], stdout=file, stderr=subprocess.STDOUT, check=False)
        if done.returncode:
            print("".join(log.read_text(encoding="utf-8").splitlines(keepends=True)[-30:]), file=sys.stderr)
        done.check_returncode()
        print(f"  {stage.check()} ({time.monotonic() - started:.0f} s)", flush=True)
    print(f"\nAll stages in {time.monotonic() - begun:.0f} s. {folder / 'online_dpo/evaluation/evaluation.html'}")
    print((logs / "evaluate.txt").read_text(encoding="utf-8").partition("\n\n")[2])


def main() -> int:
    """Reads the command line; gives the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--folder", type=Path, default=None, help="new folder for everything (default: runs/pipeline-DATE-TIME)"
    )
    folder = parser.parse_args().folder or Path("runs") / time.strftime("pipeline-%Y%m%d-%H%M%S")
    if folder.exists():
        parser.error(f"{folder} is there already")
    try:
        go_through(folder)
    except TooLow as fault:
        print(f"error: {fault}: {folder / 'logs'}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as fault:
        print(f"error: the command above ended with status {fault.returncode}: {folder / 'logs'}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
