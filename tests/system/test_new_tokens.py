"""A base model without a chat template gets one from a file, with tokens that it did not have."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTNeoXConfig

from engine import export, generate
from engine.config import Config, ConfigError, cli
from engine.data import policy_tokens
from engine.data.prompts import load_tokenizer
from engine.memory import model_shape, planning
from engine.start import prepared
from tests import users
from tests.system.helpers import run_engine, run_here
from tests.unit.test_prompt_encoding import CHATML

TOKENS = ["<|im_start|>", "<|im_end|>"]
ROWS = [{"prompt": row["prompt"], "completion": f"{row['answer']} {row['answer']}"} for row in users.ROWS]


def neox(folder: Path, rows: int = 16, tied: bool = False, **changes: Any) -> Path:
    """Pythia's architecture with the words of ``users``; padding and template are taken away."""
    shape = GPTNeoXConfig(
        vocab_size=rows, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=128, rotary_pct=0.25, tie_word_embeddings=tied,
    )  # fmt: skip
    users.model_folder(folder, shape, pad_token_id=None, **changes)
    users.edit_json(folder / "tokenizer_config.json", pad_token="</s>")
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def template(tmp_path: Path) -> Path:
    file = tmp_path / "chatml.jinja"
    file.write_text(CHATML)
    return file


def config(path: Path, template: Path, algo: str = "sft", **more: Any) -> Config:
    data = {"path": "x.jsonl", "chat_template": str(template), "new_special_tokens": TOKENS}
    return cli.validate({"algo": algo, "model": {"path": str(path)}, "data": data} | more)


@pytest.mark.parametrize(("rows", "tied", "grown"), [(16, False, 18), (16, True, 18), (40, False, 40), (64, True, 64)])
def test_new_rows_are_the_mean_of_the_known_ones(
    tmp_path: Path, template: Path, rows: int, tied: bool, grown: int
) -> None:
    base = neox(tmp_path / "base", rows, tied)
    said: list[str] = []
    folder = prepared.copied(config(base, template), said.append)
    assert prepared.copied(config(base, template), said.append) == folder and len(said) == 1, "made once"
    assert prepared.copied(config(Path(folder), template), said.append) == folder, "it needs no other"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.convert_tokens_to_ids(TOKENS)
    assert ids == [16, 17] and tokenizer.eos_token == "<|im_end|>" and tokenizer.chat_template == CHATML
    assert tokenizer.pad_token == "<pad>", "there is one, and the end of a response is none"
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (base, folder))
    assert after.config.vocab_size == grown and after.config.pad_token_id == 0 and after.config.eos_token_id == 17
    assert json.loads((Path(folder) / "generation_config.json").read_text())["eos_token_id"] == [17, 2]
    tables = [[one.get_input_embeddings().weight, one.get_output_embeddings().weight] for one in (before, after)]
    for old, new in zip(*tables, strict=True):
        assert torch.equal(new[:16], old[:16]) and torch.equal(new[18:rows], old[18:rows])
        assert torch.equal(new[16], new[17]) and torch.allclose(new[16], old[:16].mean(0), atol=1e-7)
    assert (tables[1][0].data_ptr() == tables[1][1].data_ptr()) == tied
    ids = torch.arange(3, 15)[None]
    assert torch.equal(before(ids).logits[..., :16], after(ids).logits[..., :16])


def test_a_vocabulary_that_a_gpu_can_share_stays_one(tmp_path: Path, template: Path) -> None:
    base = neox(tmp_path / "base", 64)
    tokenizer = load_tokenizer(str(base))
    tokenizer.add_tokens([f"w{i}" for i in range(48)])
    tokenizer.save_pretrained(base)
    folder = prepared.copied(config(base, template), lambda _: None)
    assert model_shape.read("model.path", folder).vocabulary == 128
    plan = planning.plans(config(base, template, launch={"device": "cpu"}), 2, 80 * 2**30)["train"]
    assert plan.phases, "a plan of a model that has no such rows yet"


def test_without_a_padding_token_there_is_a_new_one(tmp_path: Path, template: Path) -> None:
    base = neox(tmp_path / "base")
    text = (base / "tokenizer.json").read_text().replace("<pad>", "<bulk>")
    (base / "tokenizer.json").write_text(text)
    tokenizer = policy_tokens.of_run(config(base, template))
    assert tokenizer.pad_token == "<|pad|>" and tokenizer.pad_token_id == 18
    assert policy_tokens.of_run(config(base, template, data={"path": "x.jsonl"})).pad_token == "</s>", "left alone"


def test_what_does_not_go_together_is_one_line(tmp_path: Path, template: Path) -> None:
    base = neox(tmp_path / "base")
    with pytest.raises(ConfigError, match=r"lora\.rank"):
        policy_tokens.of_run(config(base, template, lora={"rank": 4}))
    with pytest.raises(ConfigError, match=r"model\.reference_path"):
        model = {"path": str(base), "reference_path": str(base)}
        policy_tokens.of_run(config(base, template, "dpo", model=model))
    with pytest.raises(ConfigError, match="only a run that trains adds tokens"):
        policy_tokens.of_model(str(base), config(base, template).data)
    data = {"path": "x.jsonl", "chat_template": str(template)}
    with pytest.raises(ConfigError, match=r"ends a turn .* data\.new_special_tokens"):
        policy_tokens.of_run(config(base, template, data=data))
    template.write_text("{{ x")
    with pytest.raises(ConfigError, match=r"chatml\.jinja.*cannot take the messages"):
        policy_tokens.of_run(config(base, template))


SHORT = (
    "--train.rows_per_step 4 --data.max_row_tokens 64 --train.tokens_per_microbatch 256 "
    "--train.learning_rate 1e-2 --train.warmup_steps 0 --train.schedule constant "
    "--launch.device cpu --live false --save.every_steps 2 --eval.every_steps 2 --data.eval_fraction 0.2"
)


def sft(model: Path, template: Path, tmp_path: Path, name: str, more: str = "") -> str:
    file = users.write_rows(tmp_path / "rows.jsonl", ROWS)
    mixture = f"[{{path: {file}, weight: 3}}, {{path: {file}, weight: 1}}]"
    return (
        f"--algo sft --model.path {model} --data.mixture '{mixture}' --data.chat_template {template} {SHORT} "
        f"--data.new_special_tokens '{','.join(TOKENS)}' --output_dir {tmp_path}/runs --name {name} {more}"
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())


def test_a_run_saves_what_it_added_and_goes_on_with_it(tmp_path: Path, template: Path, cache: Path) -> None:
    """Interrupted and resumed, with template file and prepared copy gone: the same weights, of a mixture's rows too."""
    base = neox(tmp_path / "base")
    run_here(sft(base, template, tmp_path, "whole", "--train.steps 4"))
    run_here(sft(base, template, tmp_path, "parts", "--train.steps 2"))
    whole, parts = tmp_path / "runs" / "whole", tmp_path / "runs" / "parts"
    tokenizer = AutoTokenizer.from_pretrained(whole / "model")
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<pad>" and tokenizer.chat_template == CHATML
    rows = [json.loads(line) for line in (whole / "samples.jsonl").read_text().splitlines()]
    assert all(row["prompt"].startswith("<|im_start|>") for row in rows)
    template.unlink()
    shutil.rmtree(cache)
    run_here(f"--resume {parts} --train.steps 4")
    assert json.loads((parts / "summary.json").read_text())["steps"] == 4
    seen = [[json.loads(line)["prompt"] for line in (run / "samples.jsonl").open()] for run in (whole, parts)]
    assert seen[0] == seen[1]
    other = weights(parts / "model")
    assert all(torch.equal(tensor, other[name]) for name, tensor in weights(whole / "model").items())
    shutil.rmtree(cache)
    assert export.main([str(parts), "--output", str(tmp_path / "exported")]) == 0
    for file in ("model.safetensors", "tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "exported" / file).read_bytes() == (parts / "model" / file).read_bytes()
    short = ["--rollout.max_response_tokens", "8", "--launch.device", "cpu"]
    assert generate.main([str(parts), "--output", str(tmp_path / "r.jsonl"), *short]) == 0
    answers = [json.loads(line) for line in (tmp_path / "r.jsonl").open()]
    assert answers and all(row["prompt"].startswith("<|im_start|>") for row in answers)


@pytest.mark.slow
def test_two_ranks_sample_with_vllm_what_was_prepared(tmp_path: Path, template: Path) -> None:
    """Supervised, then by reinforcement from it, on two ranks; then another model generates with the same template."""
    pytest.importorskip("vllm")
    base = neox(tmp_path / "base")
    run_engine(sft(base, template, tmp_path, "sft", "--train.steps 4 --launch.ranks 2"))
    model = tmp_path / "runs" / "sft" / "model"
    one = run_here(sft(base, template, tmp_path, "one", "--train.steps 4")) and tmp_path / "runs" / "one" / "model"
    for name, tensor in weights(model).items():
        torch.testing.assert_close(tensor, weights(one)[name], rtol=0, atol=1e-3)
    prompts = users.write_rows(tmp_path / "p.jsonl", users.ROWS)
    (tmp_path / "r.py").write_text(users.REWARD)
    run_engine(
        f"--algo rloo --model.path {base} --data.path {prompts} --data.chat_template {template} --name rl "
        f"--data.new_special_tokens '{','.join(TOKENS)}' --reward.function {tmp_path}/r.py:score "
        f"--generation.backend vllm --memory.kv_cache_gib 0.25 --rollout.prompts_per_step 4 --train.steps 2 "
        f"--rollout.samples_per_prompt 2 --rollout.max_prompt_tokens 32 --rollout.max_response_tokens 8 "
        f"--output_dir {tmp_path}/runs --launch.ranks 2 --launch.device cpu --live false"
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "runs" / "rl" / "model").eos_token == "<|im_end|>"


def test_a_reward_model_of_a_base_model_gets_them_too(tmp_path: Path, template: Path) -> None:
    """From a causal model, and from the classifier that came of it, which knows them."""
    base = neox(tmp_path / "base")
    rows = [{"prompt": row["prompt"], "chosen": "a b", "rejected": "h"} for row in users.ROWS]
    file = users.write_rows(tmp_path / "pairs.jsonl", rows)
    more = f"--data.path {file} --data.chat_template {template} --data.new_special_tokens '{','.join(TOKENS)}'"
    more += f" --algo reward_model {SHORT} --train.steps 2 --output_dir {tmp_path}/runs"
    run_here(f"--model.path {base} --name first {more}")
    first = tmp_path / "runs" / "first" / "model"
    run_here(f"--model.path {first} --name second {more}")
    shapes = [json.loads((one / "config.json").read_text()) for one in (first, tmp_path / "runs" / "second" / "model")]
    for shape in shapes:
        assert shape["vocab_size"] == 18 and shape["pad_token_id"] == 0
        assert shape["architectures"] == ["GPTNeoXForSequenceClassification"]
    assert AutoTokenizer.from_pretrained(first).chat_template == CHATML
