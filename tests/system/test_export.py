"""Checkpoints as Hugging Face folders: the weights of the run's own ``model/``, whatever wrote the checkpoint."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import engine.export
from engine.evaluation import places, response_files
from engine.sample import Sample
from engine.training import models
from engine.training.packing import pack
from tests.system.helpers import ROOT, run_engine, run_here, unranked
from tests.system.test_runs import short

RUNS = {
    "zero 0": "--algo grpo",
    "zero 0 in bf16": "--algo grpo --model.dtype bfloat16 --generation.max_logprob_gap 1",
    "zero 2 in bf16": "--algo grpo --train.zero_stage 2 --model.dtype bfloat16 --generation.max_logprob_gap 1",
    "adapters": "--algo grpo --lora.rank 4 --train.learning_rate 1e-2 --train.zero_stage 2",
}
TWO_RANKS = {
    "zero 3": "--algo grpo --train.zero_stage 3 --launch.ranks 2",
    "zero 3 in bf16": "--algo grpo --train.zero_stage 3 --launch.ranks 2 --model.dtype bfloat16 "
    "--generation.max_logprob_gap 1",
    "adapters under zero 3": "--algo grpo --train.zero_stage 3 --launch.ranks 2 --lora.rank 4",
}


def export(*arguments: object) -> int:
    return engine.export.main([str(one) for one in arguments])


def equal(one: Path, other: Path) -> None:
    """Every file of the first folder but a model card is in the second, byte for byte."""
    names = [path.relative_to(one) for path in one.rglob("*") if path.is_file() and path.name != "README.md"]
    assert names
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def check_exports(run: Path, adapters: bool) -> None:
    assert export(run, "--output", run.parent / "exported") == 0
    equal(run.parent / "exported", run / "model")
    if adapters:
        assert export(run, "--output", run.parent / "adapter", "--lora", "adapter") == 0
        alone, beside = run.parent / "adapter", run / "model" / "adapter"
        name = "adapter_model.safetensors"
        assert (alone / name).read_bytes() == (beside / name).read_bytes()
        assert adapter_settings(alone) == adapter_settings(beside)


def adapter_settings(folder: Path) -> dict:
    found = json.loads((folder / "adapter_config.json").read_text())
    return found | {"target_modules": set(found["target_modules"])}  # peft writes a set as it comes


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS)
def test_an_export_is_the_runs_own_model(tiny_model: str, tmp_path: Path, settings: str) -> None:
    run_here(short(tiny_model, tmp_path, "run") + f"{settings} --train.steps 1")
    check_exports(tmp_path / "run", "lora" in settings)


@pytest.mark.slow
@pytest.mark.parametrize("settings", TWO_RANKS.values(), ids=TWO_RANKS)
def test_an_export_joins_the_parts_of_two_ranks(tiny_model: str, tmp_path: Path, settings: str) -> None:
    run_engine(short(tiny_model, tmp_path, "run") + f"{settings} --train.steps 1")
    check_exports(tmp_path / "run", "lora" in settings)


NATS = {"float32": (1e-5, 1e-4), "bfloat16": (0.01, 0.2)}
"""By ``model.dtype``: mean and largest distance between log-probabilities of a token, as docs/pipeline.md has them."""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", NATS)
def test_vllm_agrees_with_the_trainer_about_an_export(tiny_model: str, tmp_path: Path, dtype: str) -> None:
    """Of a ZeRO-3 checkpoint of two ranks: what vLLM says of its responses, and what a pass as in training does."""
    numbers = f"--model.dtype {dtype} --generation.max_logprob_gap 1 --train.learning_rate 1e-2"
    run_engine(short(tiny_model, tmp_path, "run") + f"{TWO_RANKS['zero 3']} --train.steps 2 {numbers}")
    assert export(tmp_path / "run", "--output", tmp_path / "exported") == 0
    words = [tmp_path / "exported", "--data.task", "addition", "--rollout.samples_per_prompt", 4, "--limit", 64,
             "--rollout.max_response_tokens", 16, "--generation.backend", "vllm", "--model.dtype", dtype,
             "--output", tmp_path / "out.jsonl", "--launch.device", "cpu"]  # fmt: skip
    command = [sys.executable, "-m", "engine.generate", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=unranked(), timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = response_files.read(tmp_path / "out.jsonl")
    samples = [Sample(i, i, row["prompt_ids"], response_ids=row["response_ids"]) for i, row in enumerate(rows)]
    policy = models.load_policy(str(tmp_path / "run/model"), dtype=getattr(torch, dtype)).eval()
    with torch.no_grad():
        trained = policy(pack(samples, list(range(len(samples))), torch.device("cpu")))
    sampled = torch.tensor([value for row in rows for value in row["logprobs"]])
    gap = (trained - sampled).abs()
    mean, most = NATS[dtype]
    assert len(samples) == 256 and gap.mean() < mean and gap.max() < most
    if dtype == "bfloat16":
        assert gap.max() > 1e-4, "both compute in bf16"


@pytest.fixture(scope="module")
def run(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("exported")
    more = "--algo grpo --train.steps 2 --save.every_steps 1 --eval.every_steps 1 --train.learning_rate 1e-2 "
    more += "--save.hf_every_steps 1"
    run_here(short(tiny_model, folder, "run") + more)
    return folder / "run"


def test_a_named_step_with_card_tokenizer_and_other_numbers(run: Path, tmp_path: Path) -> None:
    whole, half = tmp_path / "whole", tmp_path / "half"
    assert export(run / "checkpoints" / "step-000001", "--output", whole) == 0
    assert export(run / "checkpoints" / "step-000001", "--output", half, "--dtype", "bfloat16") == 0
    first, last = load_file(whole / "model.safetensors"), load_file(run / "model" / "model.safetensors")
    assert any(not torch.equal(first[name], last[name]) for name in last), "another step has other weights"
    rounded = load_file(half / "model.safetensors")
    assert all(torch.equal(rounded[name], first[name].bfloat16()) for name in first)
    model = AutoModelForCausalLM.from_pretrained(half)
    assert model.dtype == torch.bfloat16 and json.loads((half / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoTokenizer.from_pretrained(half).get_vocab() == AutoTokenizer.from_pretrained(run / "model").get_vocab()
    card = (whole / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n") and "# run, step 1\n" in card
    assert "| step | reward |" in card and "| 0 |" in card and "| 1 |" in card and "| 2 |" not in card
    assert "train.learning_rate: 0.01" in card and "rollout.samples_per_prompt" not in card and "- torch " in card


def test_models_written_while_training_are_those_of_their_steps(run: Path, tmp_path: Path) -> None:
    assert sorted(path.name for path in (run / "models").iterdir()) == ["step-000001", "step-000002"]
    equal(run / "models" / "step-000002", run / "model")
    assert export(run / "checkpoints" / "step-000001", "--output", tmp_path / "out") == 0
    equal(tmp_path / "out", run / "models" / "step-000001")
    assert [place.name for place in places.models_of_run(run) if place.name != "best"] == ["step-000001", "model"]


def test_a_folder_takes_its_name_when_it_is_whole(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.evaluation import card

    def fails(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(card, "text", fails)
    assert export(run, "--output", tmp_path / "out") == 1
    assert not list(tmp_path.iterdir())


BAD = {
    "no run": (["nowhere", "--output", "OUT"], "'nowhere' is not there"),
    "no output": (["RUN"], "--output is missing: the folder to write"),
    "two": (["RUN", "RUN", "--output", "OUT"], "2 to work on, it must be one: python -m engine.export"),
    "taken": (["RUN", "--output", "RUN/model"], "output: 'RUN/model' is there already: remove it"),
    "a model": (["RUN/model", "--output", "OUT"], "'RUN/model' is neither a run's folder nor one of its checkpoints"),
    "no adapter": (["RUN", "--output", "OUT", "--lora", "adapter"], "lora adapter: RUN trained the policy's own"),
    "dtype": (["RUN", "--output", "OUT", "--dtype", "int8"], "dtype = 'int8'"),
    "key": (["RUN", "--outptu", "OUT"], "unknown key 'outptu'; did you mean output?"),
}


@pytest.mark.parametrize("words,line", BAD.values(), ids=BAD)
def test_what_cannot_work_is_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    def filled(text: str) -> str:
        return text.replace("RUN", str(run)).replace("OUT", str(tmp_path / "out"))

    assert export(*map(filled, words)) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(f"error: {filled(line)}") and said.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_checkpoints_that_are_torn_or_of_another_model(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    step = copy / "checkpoints" / "step-000002"
    weights = step / "policy" / "mp_rank_00_model_states.pt"
    found = torch.load(weights, weights_only=False)
    found["module"]["model.lm_head.weight"] = torch.zeros(3, 128)
    torch.save(found, weights)
    assert export(step, "--output", tmp_path / "out") == 2
    assert "step-000002 is no whole checkpoint: policy/mp_rank_00_model_states.pt has" in capsys.readouterr().err
    state = json.loads((step / "state.json").read_text())
    state["files"]["policy/mp_rank_00_model_states.pt"] = weights.stat().st_size
    (step / "state.json").write_text(json.dumps(state))
    assert export(step, "--output", tmp_path / "out") == 2
    assert "is of another model: model.lm_head.weight has the shape [3, 128] there" in capsys.readouterr().err
    state["base_models"]["model.path"] = "another"
    (step / "state.json").write_text(json.dumps(state))
    assert export(step, "--output", tmp_path / "out") == 2
    assert "holds other weights, or another configuration, than when" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
