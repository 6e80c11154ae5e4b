"""``--algo reward_model``: whole runs, and that transformers scores with what they leave as they do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, PreTrainedTokenizerFast

import engine.evaluate
import engine.generate
from engine import rewards
from engine.config import Config
from engine.machine.world import joined
from engine.sample import Sample
from engine.tasks import addition
from engine.training import models
from tests import users
from tests.system.helpers import run_engine, run_here, steps
from tests.system.test_export import check_exports
from tests.system.test_sft import evaluations

PAIRS = "--algo reward_model --data.task addition --data.max_row_tokens 13 --train.rows_per_step 8 --eval.prompts 16 "
SMALL = PAIRS + "--train.learning_rate 1e-3 --eval.every_steps 2 "
HELD_OUT = addition.preferences("held_out")[:16]


def by_transformers(folder: Path, model: Any = None) -> torch.Tensor:
    """[pairs, 2] scores of the held-out answers, all in one padded batch."""
    model = model or AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [row["prompt"] + row[side] + "<eos>" for row in HELD_OUT for side in ("chosen", "rejected")]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    assert not batch["attention_mask"].all(), "some are padded"
    with torch.no_grad():
        return model(**batch).logits.view(-1, 2)


def assert_measured(found: dict[str, float], scores: torch.Tensor) -> None:
    """A run's held-out numbers are those of the scores."""
    margins = scores[:, 0] - scores[:, 1]
    assert found["eval/reward_mean"] == pytest.approx(float(scores.mean()), abs=1e-5)
    assert found["eval/reward_margin"] == pytest.approx(float(margins.mean()), abs=1e-5)
    assert found["eval/accuracy"] == pytest.approx(float((margins > 0).float().mean()))
    assert found["eval/accuracy_stderr"] == pytest.approx(float((margins > 0).double().std() / len(margins) ** 0.5))
    losses = -torch.nn.functional.logsigmoid(margins)
    assert found["eval/loss"] == pytest.approx(float(losses.mean()), abs=1e-5)
    assert found["eval/loss_stderr"] == pytest.approx(float(losses.std() / len(losses) ** 0.5), rel=1e-3)


@pytest.mark.usefixtures("without_pictures")
def test_a_run_its_resumption_and_its_models(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = f"{SMALL} --model.path {tiny_model} --output_dir {tmp_path} --save.every_steps 2 --save.hf_every_steps 2"
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    said = run_here(f"{options} --name whole --train.steps 6").stdout
    run_here(f"{options} --name parts --train.steps 4")
    run_here(f"--resume {parts} --train.steps 6")
    for expected, got in zip(steps(whole), steps(parts), strict=True):
        for key, value in expected.items():
            if not key.startswith(("time/", "memory/", "tokens_per_second", "idle/")):
                assert got[key] == value, key
    for name, wanted in load_file(whole / "model/model.safetensors").items():
        assert torch.equal(load_file(parts / "model/model.safetensors")[name], wanted)

    assert_measured(evaluations(whole)[-1], by_transformers(whole / "model"))
    best = max(evaluations(whole)[1:], key=lambda row: row["eval/accuracy"])
    assert_measured(best, by_transformers(whole / "best"))
    assert {path.name for path in (whole / "models").iterdir()} == {f"step-00000{step}" for step in (2, 4, 6)}
    check_exports(whole, adapters=False)
    card = (tmp_path / "exported/README.md").read_text()
    assert "text-classification" in card and "A reward model that Tandem trained" in card

    page = (whole / "report.html").read_text()
    assert "Accuracy, before → after" in page and "on held-out rows" in page and "Reward, first" not in page
    assert "REWARD_MODEL: accuracy" in said and "AutoModelForSequenceClassification.from_pretrained" in said
    capsys.readouterr()
    assert engine.generate.main([str(whole), "--output", f"{tmp_path}/x.jsonl"]) == 2
    assert (
        engine.generate.main([f"{tmp_path}/exported", "--output", f"{tmp_path}/x.jsonl", "--data.task", "addition"])
        == 2
    )
    assert engine.evaluate.main([str(whole)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.endswith("is a reward model: it writes nothing") for line in lines)


def test_a_new_head_follows_from_the_seed(tiny_model: str) -> None:
    heads = [models.load_reward_model(tiny_model, 0, seed)[0].model.score.weight.detach() for seed in (0, 0, 1)]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert float(heads[0].std()) == pytest.approx(129**-0.5, rel=0.2)


@pytest.mark.usefixtures("without_pictures")
def test_adapters_with_a_head_of_their_own(tiny_model: str, tmp_path: Path) -> None:
    """The head is trained in full beside them; peft loads both."""
    from peft import PeftModel

    more = "--lora.rank 4 --train.zero_stage 2 --train.steps 3"
    run_here(f"{SMALL} --model.path {tiny_model} --output_dir {tmp_path} --name run {more}")
    run = tmp_path / "run"
    scores = by_transformers(run / "model")
    assert_measured(evaluations(run)[-1], scores)
    new, trained = models.load_reward_model(tiny_model, 0, 0)[0].model, load_file(run / "model/model.safetensors")
    assert not torch.equal(new.score.weight, trained["score.weight"])
    assert torch.equal(new.model.norm.weight, trained["model.norm.weight"])
    check_exports(run, adapters=True)
    base = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    apart = PeftModel.from_pretrained(base, run / "model/adapter").eval()
    torch.testing.assert_close(by_transformers(run / "model", apart), scores, rtol=1e-4, atol=1e-5)


def with_tokenizer(tiny_model: str, folder: Path, padding: str | None) -> Path:
    """The policy with another padding token, or with none and no token to spare."""
    tokenizer = addition.tokenizer()
    if padding is None:
        core = json.loads(tokenizer.backend_tokenizer.to_str().replace("<pad>", "<x>"))
        core["added_tokens"] = [token for token in core["added_tokens"] if token["content"] != "<x>"]
        (folder.parent / "core.json").write_text(json.dumps(core))
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(folder.parent / "core.json"), bos_token="<bos>", eos_token="<eos>"
        )
    else:
        tokenizer.pad_token = padding
    shutil.copytree(tiny_model, folder)
    tokenizer.save_pretrained(folder)
    users.edit_json(folder / "config.json", pad_token_id=tokenizer.pad_token_id)
    return folder


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("padding,given", [("<eos>", "<pad>"), (None, "<|pad|>")])
def test_padding_ends_no_response(tiny_model: str, tmp_path: Path, padding: str | None, given: str) -> None:
    """An unused token is taken, or a new one with a row of its own; runs take both as reward and as value model."""
    policy = with_tokenizer(tiny_model, tmp_path / "policy", padding)
    pairs = users.write_rows(tmp_path / "pairs.jsonl", addition.preferences("train")[:16])
    held_out = users.write_rows(tmp_path / "held_out.jsonl", HELD_OUT)
    data = f"--data.path {pairs} --data.eval_path {held_out} --data.max_row_tokens 13"
    run_here(
        f"--algo reward_model --model.path {policy} {data} --train.rows_per_step 8 --train.steps 2 "
        f"--train.learning_rate 1e-3 --output_dir {tmp_path} --name run"
    )
    folder = tmp_path / "run/model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (
        tokenizer.pad_token == given
        and tokenizer.pad_token_id == json.loads((folder / "config.json").read_text())["pad_token_id"]
    )
    scores = by_transformers(folder)
    assert_measured(evaluations(tmp_path / "run")[-1], scores)
    check_exports(tmp_path / "run", adapters=False)

    config = Config.model_validate(
        {
            "model": {"path": str(policy)},
            "reward": {"model": str(folder)},
            "rollout": {"max_response_tokens": 6, "max_prompt_tokens": 7},
        }
    )
    with joined("cpu", 5) as world:
        answers = [sampled(row["prompt"], row[side]) for row in HELD_OUT for side in ("chosen", "rejected")]
        rewards.load(config, world).score(answers)
    torch.testing.assert_close(torch.tensor([one.reward for one in answers]), scores.flatten(), rtol=1e-4, atol=1e-5)
    run_here(
        f"--algo ppo --model.path {policy} --model.value_path {folder} --reward.model {folder} --train.steps 1 "
        f"--data.path {pairs} --rollout.prompts_per_step 4 --rollout.samples_per_prompt 1 --ppo.value_warmup_steps 0 "
        f"--rollout.max_prompt_tokens 7 --rollout.max_response_tokens 6 --output_dir {tmp_path} --name ppo"
    )


def sampled(prompt: str, answer: str) -> Sample:
    tokenizer = addition.tokenizer()
    ids = tokenizer.encode(answer, add_special_tokens=False)
    return Sample(0, 0, tokenizer.encode(prompt), response_ids=[*ids, tokenizer.eos_token_id], finish_reason="stop")


def two_labels(folder: Path) -> Path:
    config = addition.model_config()
    config.num_labels = 2
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    addition.tokenizer().save_pretrained(folder)
    return folder


def encoder(folder: Path) -> Path:
    config = BertConfig(
        vocab_size=15, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, num_labels=1
    )
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    addition.tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "kind,line",
    [
        (two_labels, "is a classifier with 2 labels; a reward model has one"),
        (encoder, "is no decoder with a head called"),
    ],
)
def test_a_folder_of_the_wrong_kind_is_one_line(tmp_path: Path, kind: Any, line: str) -> None:
    folder = kind(tmp_path / "model")
    said = run_here(f"{SMALL} --model.path {folder} --output_dir {tmp_path / 'runs'}", ok=False)
    assert line in said.stderr and said.stderr.count("\n") == 1 and not (tmp_path / "runs").exists()


OWN = """
from algorithms.reward_model import RewardModel


class Hinge(RewardModel):
    name = "hinge"

    def objective(self, rollout, settings, run):
        import dataclasses

        def hinge(chosen, rejected, margins):
            return (1 + margins - chosen + rejected).relu()

        return dataclasses.replace(super().objective(rollout, settings, run), score_loss=hinge)
"""


@pytest.mark.usefixtures("without_pictures")
def test_a_loss_of_ones_own(tiny_model: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    options = PAIRS.replace("reward_model", f"{tmp_path}/own.py:Hinge")
    run_here(f"{options} --model.path {tiny_model} --output_dir {tmp_path} --name run --train.steps 1")
    scores = by_transformers(tmp_path / "run/model")
    hinge = (1 - scores[:, 0] + scores[:, 1]).relu().mean()
    assert evaluations(tmp_path / "run")[-1]["eval/loss"] == pytest.approx(float(hinge), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["2", "3", "3 --lora.rank 4"])
def test_two_ranks_learn_what_one_does(tiny_model: str, tmp_path: Path, stage: str) -> None:
    """Also where one has a pair, and so a forward pass, less than the other."""
    options = (
        f"{SMALL} --model.path {tiny_model} --output_dir {tmp_path} --train.steps 3 --reward_model.centring_coef 0.1 "
        f"--train.zero_stage {stage} --train.tokens_per_microbatch 26 --eval.prompts 15"
    )
    run_here(f"{options} --name one")
    run_engine(f"{options} --name two --launch.ranks 2")
    rows = [[*steps(tmp_path / name), evaluations(tmp_path / name)[-1]] for name in ("one", "two")]
    for one, two in zip(*rows, strict=True):
        for key in one.keys() & {"reward_model/loss", "reward_model/grad_norm", "eval/loss", "eval/accuracy_stderr"}:
            assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5), key
    check_exports(tmp_path / "two", "lora" in stage)
