"""Direct preference optimization on given pairs: whole runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.training.trainer import Trainer
from tests.system.helpers import run_engine, run_here, steps
from tests.system.test_sft import evaluations

PAIRS = "--algo dpo --data.task addition --data.max_row_tokens 13 --train.rows_per_step 8 --train.learning_rate 1e-3 "
SMALL = PAIRS + "--eval.prompts 16 --eval.every_steps 2 --dpo.beta 0.5 "


@pytest.mark.usefixtures("without_pictures")
def test_a_run_and_its_resumption(tiny_model: str, tmp_path: Path) -> None:
    """Rewards of chosen and rejected answers, their margin and how many are told apart, while training and held out."""
    options = (
        f"{SMALL} --model.path {tiny_model} --output_dir {tmp_path} --save.every_steps 2 --save.samples_per_step 8"
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_here(f"{options} --name whole --train.steps 6")
    run_here(f"{options} --name parts --train.steps 4")
    run_here(f"--resume {parts} --train.steps 6")
    assert (parts / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
    for expected, got in zip(steps(whole), steps(parts), strict=True):
        for key, value in expected.items():
            if not key.startswith(("time/", "memory/", "tokens_per_second", "idle/")):
                assert got[key] == value, key
        assert got["policy/margin"] == pytest.approx(
            got["policy/chosen_reward"] - got["policy/rejected_reward"], abs=1e-6
        )
    for name, wanted in load_file(whole / "model/model.safetensors").items():
        assert torch.equal(load_file(parts / "model/model.safetensors")[name], wanted)
    first, *_, last = evaluations(whole)
    assert first["eval/margin"] == pytest.approx(0.0, abs=1e-5), "the policy starts as its reference"
    assert first["eval/loss"] == pytest.approx(0.6931, abs=1e-3) and last["eval/loss"] != first["eval/loss"]
    assert 0 <= last["eval/pair_accuracy"] <= 1 and "eval/perplexity" not in last


@pytest.mark.usefixtures("without_pictures")
def test_the_reference_reads_each_row_once(tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two passes over six rows, LoRA or not: twelve sequences of training rows and four held-out ones."""
    seen: list[int] = []
    plain = Trainer.reference_logprobs

    def counting(self: Trainer, samples: list) -> torch.Tensor | None:
        seen.append(len(samples))
        return plain(self, samples)

    monkeypatch.setattr(Trainer, "reference_logprobs", counting)
    rows = [{"prompt": f"{a}0+0{a}=", "chosen": f"{a}{a}", "rejected": f"{a}0"} for a in range(1, 9)]
    for name, part in (("train", rows[:6]), ("held", rows[6:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    for rank in (0, 2):
        seen.clear()
        run_here(
            f"--algo dpo --model.path {tiny_model} --data.path {tmp_path}/train.jsonl --lora.rank {rank} "
            f"--data.eval_path {tmp_path}/held.jsonl --train.epochs 2 --train.rows_per_step 3 --eval.every_steps 1 "
            f"--train.learning_rate 1e-2 --output_dir {tmp_path} --name r{rank}"
        )
        assert len(steps(tmp_path / f"r{rank}")) == 4 and seen == [4, 12]
        last = evaluations(tmp_path / f"r{rank}")[-1]
        assert last["eval/margin"] > 0
        margins = implicit_margins(tmp_path / f"r{rank}/model", tiny_model, rows[6:])
        assert last["eval/margin_stderr"] == pytest.approx(float(margins.std() / 2**0.5), rel=1e-2)
        losses = -torch.nn.functional.logsigmoid(margins)
        assert last["eval/loss_stderr"] == pytest.approx(float(losses.std() / 2**0.5), rel=1e-2)
        assert {f"eval/{name}_stderr" for name in ("pair_accuracy", "chosen_reward", "rejected_reward")} <= last.keys()


@torch.no_grad()
def implicit_margins(policy: Path, reference: str, rows: list[dict[str, str]]) -> torch.Tensor:
    """Of each row, by transformers, with a beta of 0.1."""
    tokenizer, sums = AutoTokenizer.from_pretrained(reference), []
    for model in (AutoModelForCausalLM.from_pretrained(path) for path in (policy, reference)):
        for row in rows:
            for side in ("chosen", "rejected"):
                prompt = len(tokenizer(row["prompt"])["input_ids"])
                ids = torch.tensor([[*tokenizer(row["prompt"] + row[side])["input_ids"], 2]])
                logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
                sums.append(logprobs[prompt - 1 :].sum())
    new, old = torch.stack(sums).view(2, len(rows), 2)
    return 0.1 * ((new - old)[:, 0] - (new - old)[:, 1])


@pytest.mark.slow
def test_two_ranks_learn_what_one_does(tiny_model: str, tmp_path: Path) -> None:
    """Any rank may draw any row, whoever asked the reference about it."""
    options = f"{SMALL} --model.path {tiny_model} --output_dir {tmp_path} --train.steps 3"
    run_here(f"{options} --name one")
    run_engine(f"{options} --name two --launch.ranks 2 --train.zero_stage 2")
    for one, two in zip(steps(tmp_path / "one"), steps(tmp_path / "two"), strict=True):
        for key in ("policy/loss", "policy/grad_norm", "policy/margin"):
            assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5), key
    for one, two in zip(evaluations(tmp_path / "one"), evaluations(tmp_path / "two"), strict=True):
        for key in ("eval/loss", "eval/loss_stderr", "eval/margin_stderr"):
            assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5), key
