"""Supervised fine-tuning: whole runs on rows, and that packing changes nothing of loss and gradient."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine.config import Config
from engine.machine.world import joined
from engine.rollouts import experience
from engine.sample import Sample
from engine.training import models
from engine.training.trainer import Trainer
from tests.system.helpers import run_engine, run_here, steps

ROWS = "--algo sft --data.task addition --data.max_row_tokens 13 --train.rows_per_step 8 --train.learning_rate 1e-2 "
SMALL = ROWS + "--eval.prompts 16 --eval.every_steps 2 "


def given(count: int) -> list[Sample]:
    """Sequences of uneven lengths, every second one with a mask that has gaps."""
    draw = random.Random(0)
    samples = []
    for i in range(count):
        prompt, response = ([draw.randint(3, 14) for _ in range(draw.randint(low, 9))] for low in (1, 3))
        mask = np.array([True, False] + [draw.random() < 0.5 for _ in response[2:]]) if i % 2 else None
        samples.append(Sample(i, i, prompt, response_ids=response, loss_mask=mask, reward=0.0))
    return samples


def test_packed_equals_unpacked(tiny_model: str) -> None:
    """One sequence a forward pass, or as many as fit; and the loss of transformers on padded rows, labels masked."""
    samples, found = given(12), {}
    with joined("cpu", 5) as world:
        for budget in (18, 80):
            config = Config.model_validate(
                {"algo": "sft", "train": {"tokens_per_microbatch": budget, "learning_rate": 0.0, "max_grad_norm": 0.0}}
            )
            trainer = Trainer(config, world, policy=models.load_policy(tiny_model), reference=None, value=None)
            gradient: dict[str, torch.Tensor] = {}
            parameters = dict(trainer.policy.module.named_parameters())
            trainer.policy.optimizer.register_step_pre_hook(
                lambda *_, into=gradient, of=parameters: into.update({n: p.grad.clone() for n, p in of.items()})
            )
            rollout = experience.rollout(samples, None, None, None, None)
            objective = experience.objective(config, rollout, 0.0, world)
            found[budget] = trainer.update(samples, {}, objective, step=0, version=0).metrics["policy/loss"], gradient
    (alone, apart), (packed, together) = found[18], found[80]
    assert packed == pytest.approx(alone, rel=1e-6)
    for name, wanted in apart.items():
        torch.testing.assert_close(together[name], wanted, rtol=1e-4, atol=1e-7)

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    losses = []
    for one in samples:
        ids = torch.tensor([[*one.prompt_ids, *one.response_ids]])
        logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        mask = torch.ones(len(one.response_ids), dtype=torch.bool)
        if one.loss_mask is not None:
            mask = torch.from_numpy(one.loss_mask)
        losses.append(-logprobs[len(one.prompt_ids) - 1 :][mask])
    assert packed == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)


def evaluations(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "eval/loss" in row]


@pytest.mark.usefixtures("without_pictures")
def test_a_run_and_its_resumption(tiny_model: str, tmp_path: Path) -> None:
    """Six steps in one go, and four with a resumption for six: the same rows, metrics and model, bit for bit."""
    options = (
        f"{SMALL} --model.path {tiny_model} --output_dir {tmp_path} --save.every_steps 2 --save.samples_per_step 8"
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    told = run_here(f"{options} --name whole --train.steps 6").stdout
    assert "5904 training rows of" in told and "8 rows (on 1 rank: 8 each), one optimizer step" in told
    assert "SFT: held-out loss" in told and "tok/s" in told
    run_here(f"{options} --name parts --train.steps 4")
    run_here(f"--resume {parts} --train.steps 6")
    for name in ("samples.jsonl",):
        assert (parts / name).read_text() == (whole / name).read_text()
    for expected, got in zip(steps(whole), steps(parts), strict=True):
        assert not {"reward/mean", "policy/ratio_mean", "time/sync_bytes"} & got.keys()
        for key, value in expected.items():
            if not key.startswith(("time/", "memory/", "tokens_per_second")):
                assert got[key] == value, key
    for name, wanted in load_file(whole / "model/model.safetensors").items():
        assert torch.equal(load_file(parts / "model/model.safetensors")[name], wanted)
    found = evaluations(whole)
    assert [row["step"] for row in found] == [0, 2, 4, 6]
    for row in found:
        assert row["eval/perplexity"] == pytest.approx(np.exp(row["eval/loss"])) and 0 < row["eval/token_accuracy"] < 1
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["loss_before"] == found[0]["eval/loss"] > found[-1]["eval/loss"] == summary["loss_after"]
    assert (whole / "best" / "model.safetensors").exists() and summary["generation_backend"] is None
    assert "held-out rows" in (whole / "report.html").read_text()


@pytest.mark.usefixtures("without_pictures")
def test_epochs_lora_and_an_evaluation_that_is_transformers_own(tiny_model: str, tmp_path: Path) -> None:
    """Two passes over five rows in batches of four are three steps. The best policy has the held-out loss it is kept
    for; standard errors are over rows, of unequal lengths."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = [{"prompt": f"{a}0+0{a}=", "completion": f"{a}{a}"[: 1 + a % 2]} for a in range(1, 6)]
    for name, part in (("train", rows), ("held", rows[:3])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    told = run_here(
        f"--algo sft --model.path {tiny_model} --data.path {tmp_path}/train.jsonl "
        f"--data.eval_path {tmp_path}/held.jsonl --train.epochs 2 --train.rows_per_step 4 "
        f"--train.learning_rate 1e-2 --lora.rank 2 --output_dir {tmp_path} --name r --eval.every_steps 1"
    ).stdout
    assert "3 of 3 held-out rows are training rows too" in told
    run = tmp_path / "r"
    assert len(steps(run)) == 3 and steps(run)[-1]["progress/epoch"] == 12 / 5
    assert "steps: 3" in (run / "config.yaml").read_text() and "epochs: null" in (run / "config.yaml").read_text()
    best = min(evaluations(run)[1:], key=lambda row: row["eval/loss"])
    model, tokenizer = AutoModelForCausalLM.from_pretrained(run / "best"), AutoTokenizer.from_pretrained(run / "best")
    losses, right = [], []
    for row in rows[:3]:
        prompt = tokenizer(row["prompt"])["input_ids"]
        ids = torch.tensor([[*prompt, *tokenizer(row["completion"], add_special_tokens=False)["input_ids"], 2]])
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :], reduction="none"))
        right.append(logits.argmax(-1) == ids[0, len(prompt) :])
    assert best["eval/loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-4)
    assert best["eval/token_accuracy"] == pytest.approx(float(torch.cat(right).float().mean()))
    stderr = ratio_stderr([one.sum().item() for one in losses], [len(one) for one in losses])
    assert best["eval/loss_stderr"] == pytest.approx(stderr, rel=1e-3)
    assert best["eval/perplexity_stderr"] == pytest.approx(stderr * best["eval/perplexity"], rel=1e-3)
    stderr = ratio_stderr([float(one.sum()) for one in right], [len(one) for one in right])
    assert best["eval/token_accuracy_stderr"] == pytest.approx(stderr)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["loss_after_stderr"] == evaluations(run)[-1]["eval/loss_stderr"]
    assert told.count("perplexity_stderr") == 0 and "(+/- " in told and "standard error at the end" in told
    assert " ± " in (run / "report.html").read_text()


def ratio_stderr(totals: list[float], sizes: list[int]) -> float:
    """Of the ratio of two sums, by the variances and the covariance of its terms."""
    mean, size = np.mean(totals), np.mean(sizes)
    spread = np.cov(totals, sizes)
    ratio = mean / size
    variance = spread[0, 0] - 2 * ratio * spread[0, 1] + ratio**2 * spread[1, 1]
    return float(np.sqrt(variance / len(totals)) / size)


@pytest.mark.slow
def test_two_ranks_with_zero3_learn_what_one_does(tiny_model: str, tmp_path: Path) -> None:
    options = f"{SMALL} --model.path {tiny_model} --output_dir {tmp_path} --train.steps 3"
    run_here(f"{options} --name one")
    run_engine(f"{options} --name two --launch.ranks 2 --train.zero_stage 3")
    for one, two in zip(steps(tmp_path / "one"), steps(tmp_path / "two"), strict=True):
        for key in ("policy/loss", "policy/grad_norm", "rows/tokens_mean"):
            assert two[key] == pytest.approx(one[key], rel=1e-3), key
    for one, two in zip(evaluations(tmp_path / "one"), evaluations(tmp_path / "two"), strict=True):
        for key in ("eval/loss", "eval/loss_stderr", "eval/perplexity_stderr"):
            assert two[key] == pytest.approx(one[key], rel=1e-3), key


@pytest.mark.usefixtures("without_pictures")
def test_the_embedded_task_is_learned_from_random_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    run_here(f"--algo sft --output_dir {tmp_path} --name r --train.steps 4 --eval.prompts 64 --train.rows_per_step 32")
    before, after = (evaluations(tmp_path / "r")[place]["eval/loss"] for place in (0, -1))
    assert before == pytest.approx(np.log(15), rel=0.05) and after < before
