"""The same rows through TRL's SFTTrainer, DPOTrainer and RewardTrainer and through whole runs of ours: loss and
gradient norm of every step agree, in fp32, without dropout, shuffling or packing, in one process."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from engine.tasks import addition
from tests.system.helpers import run_here, steps

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="TRL is not installed: pip install -r requirements/test.txt"
)
BATCH, STEPS, RATE = 4, 3, 1e-3


def theirs(algo: str, model: str, rows: list[dict[str, Any]], out: Path, **settings: Any) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step by TRL's own trainer and its defaults, AdamW at a constant rate."""
    import trl.import_utils as available

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(available, "is_vllm_available", lambda *_, **__: False)
        from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
    from datasets import Dataset
    from torch.utils.data import SequentialSampler

    kind, config, auto = {
        "sft": (SFTTrainer, SFTConfig, AutoModelForCausalLM),
        "dpo": (DPOTrainer, DPOConfig, AutoModelForCausalLM),
        "reward_model": (RewardTrainer, RewardConfig, AutoModelForSequenceClassification),
    }[algo]
    losses: list[float] = []

    class Recording(kind):  # type: ignore[misc,valid-type]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            losses.append(loss.item())
            return loss

        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(dataset or self.train_dataset)

    trainer = Recording(
        auto.from_pretrained(model),
        args=config(
            output_dir=str(out), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
            disable_tqdm=True, per_device_train_batch_size=BATCH, max_steps=STEPS, learning_rate=RATE, logging_steps=1,
            lr_scheduler_type="constant", max_grad_norm=1e9, save_strategy="no", **settings,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
    )  # fmt: skip
    trainer.train()
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    return list(zip(losses, map(float, norms), strict=True))


def ours(algo: str, model: str, rows: list[dict[str, Any]], out: Path, more: str = "") -> list[tuple[float, float]]:
    (out / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_here(
        f"--algo {algo} --model.path {model} --data.path {out}/rows.jsonl --data.shuffle false --output_dir {out} "
        f"--name ours --train.steps {STEPS} --train.rows_per_step {BATCH} --train.learning_rate {RATE} "
        f"--train.max_grad_norm 0 --train.adam_betas 0.9,0.999 --data.max_row_tokens 64 {more}"
    )
    trained = "reward_model" if algo == "reward_model" else "policy"
    return [(row[f"{trained}/loss"], row[f"{trained}/grad_norm"]) for row in steps(out / "ours")]


def assert_agree(ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> None:
    assert len(ours) == len(theirs) == STEPS
    for step, (got, wanted) in enumerate(zip(ours, theirs, strict=True)):
        assert got == pytest.approx(wanted, rel=1e-5, abs=1e-6), f"step {step + 1}"


@pytest.mark.usefixtures("without_pictures")
def test_sft(tiny_model: str, tmp_path: Path) -> None:
    """Prompts with completions: the loss is the mean over the batch's tokens after the prompts."""
    rows = addition.worked("train")[: BATCH * STEPS]
    want = theirs("sft", tiny_model, rows, tmp_path / "trl", completion_only_loss=True)
    assert_agree(ours("sft", tiny_model, rows, tmp_path), want)


@pytest.mark.parametrize("loss", ["sigmoid", "hinge"])
@pytest.mark.usefixtures("without_pictures")
def test_dpo(tiny_model: str, tmp_path: Path, loss: str) -> None:
    """The reference is the policy before training, computed once for each row."""
    rows = addition.preferences("train")[: BATCH * STEPS]
    want = theirs("dpo", tiny_model, rows, tmp_path / "trl", beta=0.3, loss_type=loss)
    assert_agree(ours("dpo", tiny_model, rows, tmp_path, f"--dpo.beta 0.3 --dpo.loss {loss}"), want)


@pytest.mark.parametrize("centring,margins", [(0.0, False), (0.05, True)])
@pytest.mark.usefixtures("without_pictures")
def test_reward_model(tiny_model: str, tmp_path: Path, centring: float, margins: bool) -> None:
    """From the same head; TRL takes a column ``margin`` wherever there is one."""
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(start := str(tmp_path / "start"))
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(start)
    rows = addition.preferences("train")[: BATCH * STEPS]
    rows = [row | {"margin": place % 3 - 0.5} for place, row in enumerate(rows)] if margins else rows
    want = theirs("reward_model", start, rows, tmp_path / "trl", center_rewards_coefficient=centring or None)
    more = f"--reward_model.centring_coef {centring} " + "--data.margin_column margin" * margins
    assert_agree(ours("reward_model", start, rows, tmp_path, more), want)
