"""Responses of a model into a file: the sampler's own numbers, whatever the file, and the same after a kill."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from transformers import AutoModelForCausalLM

import engine.generate
from engine.config import ConfigError
from engine.evaluation import response_files, sampling
from engine.generation.base import Request, Sampling
from engine.generation.hf import HFGenerator, truncated
from tests import users
from tests.system.helpers import ROOT, run_here, unranked
from tests.system.test_runs import short


def generate(*arguments: object) -> int:
    return engine.generate.main([str(one) for one in arguments])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return users.model_folder(tmp_path_factory.mktemp("model") / "policy")


@pytest.fixture
def asked(model: Path, tmp_path: Path) -> list[object]:
    """Ten prompts for the model, two responses each, four of them at a time."""
    data = users.write_rows(tmp_path / "data.jsonl", users.ROWS[:10])
    more = ["--rollout.samples_per_prompt", 2, "--rollout.max_response_tokens", 6, "--generation.max_batch", 4]
    return [model, "--data.path", data, *more, "--launch.device", "cpu"]


def test_rows_have_what_was_sampled_and_the_datas_columns(asked: list[object], model: Path, tmp_path: Path) -> None:
    assert generate(*asked, "--output", tmp_path / "out.jsonl") == 0
    rows = response_files.read(tmp_path / "out.jsonl")
    assert [(row["row"], row["sample"]) for row in rows] == [(i // 2, i % 2) for i in range(20)]
    assert [row["raw_prompt"] for row in rows[::2]] == [row["prompt"] for row in users.ROWS[:10]]
    assert [row["answer"] for row in rows[::2]] == [row["answer"] for row in users.ROWS[:10]]
    assert len({tuple(row["response_ids"]) for row in rows}) > 10
    whole = AutoModelForCausalLM.from_pretrained(model)
    for row in rows:
        assert (row["finish_reason"] == "stop") == (row["response_ids"][-1] == 2)
        assert row["response"] == users.tokenizer().decode(row["response_ids"], skip_special_tokens=True)
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        logprobs = whole(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(row["logprobs"]), logprobs[-len(row["logprobs"]) :], rtol=0, atol=1e-4)
    assert not list(tmp_path.glob("partial-*"))


def test_rows_to_train_on_are_asked_what_training_takes_for_the_prompt(model: Path, tmp_path: Path) -> None:
    """Conversations whose last message is the answer, and pairs that hold their prompt."""
    chat = shutil.copytree(model, tmp_path / "chat")
    tokenizer = users.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} <turn> {% endfor %}"
    tokenizer.save_pretrained(chat)
    turns = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
    for columns, wanted in (
        ({"messages": turns}, turns[:1]),
        ({"chosen": turns, "rejected": [turns[0], turns[1] | {"content": "d"}]}, turns[:1]),
        ({"chosen": "a b c", "rejected": "a b d"}, "a b"),
        ({"prompt": "e", "messages": turns}, "e"),
    ):
        data = users.write_rows(tmp_path / "data.jsonl", [columns])
        output = tmp_path / "out.jsonl"
        output.unlink(missing_ok=True)
        more = ["--rollout.max_response_tokens", 2, "--launch.device", "cpu", "--output", output]
        assert generate(chat, "--data.path", data, *more) == 0
        (row,) = response_files.read(output)
        assert row["raw_prompt"] == wanted and row["prompt"] in ("a b <turn>", "a b", "e")
        assert all(row[name] == value for name, value in columns.items() if name != "prompt")


def test_parquet_has_the_same_rows(asked: list[object], tmp_path: Path) -> None:
    assert generate(*asked, "--output", tmp_path / "out.jsonl") == 0
    assert generate(*asked, "--output", tmp_path / "out.parquet") == 0
    assert response_files.read(tmp_path / "out.parquet") == response_files.read(tmp_path / "out.jsonl")
    assert pyarrow.parquet.read_schema(tmp_path / "out.parquet").field("response_ids").type.value_type == "int64"


@pytest.mark.parametrize("torn", [b"", b'{"row": 4, "sam'])
def test_a_killed_command_goes_on_with_the_same_numbers(
    asked: list[object],
    tmp_path: Path,
    torn: bytes,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert generate(*asked, "--output", tmp_path / "whole.jsonl") == 0
    add, drawn = response_files.Unfinished.add, []

    def dies(self: response_files.Unfinished, rows: response_files.Rows) -> None:
        if self.rows == 8:
            with self.path.open("ab") as file:
                file.write(torn)
            raise KeyboardInterrupt
        add(self, rows)

    monkeypatch.setattr(response_files.Unfinished, "add", dies)
    assert generate(*asked, "--output", tmp_path / "out.jsonl") == 130
    assert not (tmp_path / "out.jsonl").exists() and (tmp_path / "partial-out.jsonl").exists()
    monkeypatch.setattr(response_files.Unfinished, "add", add)

    def counted(*arguments: object) -> object:
        drawn.append(arguments)
        return sample(*arguments)

    sample = sampling._sample
    monkeypatch.setattr(sampling, "_sample", counted)
    capsys.readouterr()
    assert generate(*asked, "--output", tmp_path / "out.jsonl", "--generation.temperature", 0.5) == 2
    line = (
        "holds responses made with generation.temperature 1.0, and now it is 0.5: remove it, or give another --output"
    )
    assert line in capsys.readouterr().err
    assert generate(*asked, "--output", tmp_path / "out.jsonl") == 0
    assert len(drawn) == 3 and "Going on after 8 of 20 responses" in capsys.readouterr().out
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not (tmp_path / "partial-out.jsonl").exists()


def test_a_partial_file_without_a_row_binds_nobody(tmp_path: Path) -> None:
    response_files.Unfinished(tmp_path / "out.jsonl", {"judge": "a"})
    other = response_files.Unfinished(tmp_path / "out.jsonl", {"judge": "b"})
    other.add([{"row": 0}])
    with pytest.raises(ConfigError, match="made with judge b, and now it is a"):
        response_files.Unfinished(tmp_path / "out.jsonl", {"judge": "a"})
    assert response_files.Unfinished(tmp_path / "out.jsonl", {"judge": "b"}).rows == 1


def test_stop_strings_end_text_and_tokens(asked: list[object], tmp_path: Path) -> None:
    assert generate(*asked, "--output", tmp_path / "whole.jsonl") == 0
    assert generate(*asked, "--output", tmp_path / "cut.jsonl", "--generation.stop_strings", "[b c, a]") == 0
    cut = 0
    for whole, row in zip(*map(response_files.read, (tmp_path / "whole.jsonl", tmp_path / "cut.jsonl")), strict=True):
        places = [place for one in ("b c", "a") if (place := whole["response"].find(one)) >= 0]
        assert row["response"] == (whole["response"][: min(places)] if places else whole["response"])
        count = len(row["response_ids"])
        assert row["response_ids"] == whole["response_ids"][:count] and row["logprobs"] == whole["logprobs"][:count]
        if places:
            cut += 1
            ended = users.tokenizer().decode(row["response_ids"], skip_special_tokens=True)
            assert row["finish_reason"] == "stop" and ended.endswith(("b c", "a"))
    assert cut


@pytest.mark.parametrize("settings,most", [({"top_k": 3}, 3), ({"top_p": 0.4}, 16), ({"top_k": 8, "top_p": 0.3}, 8)])
def test_truncated_sampling_draws_from_the_renormalised_head(model: Path, settings: dict, most: int) -> None:
    """Against the definition, token by token: the first of sorted probabilities that reach top_p together."""
    generator = HFGenerator(str(model), dtype=torch.float32, device=torch.device("cpu"), max_batch=64)
    requests = [Request([1, 8, 9], seed) for seed in range(64)]
    drawn = generator.generate(requests, Sampling(1, 0.7, (), **settings))
    logits = AutoModelForCausalLM.from_pretrained(model)(torch.tensor([[1, 8, 9]])).logits[0, -1] / 0.7
    ordered, places = logits.softmax(-1).sort(descending=True)
    head = ordered[: settings.get("top_k", 16)]
    head = head / head.sum()
    kept = int((head.cumsum(0) - head < settings.get("top_p", 2)).sum())
    expected = dict(zip(places[:kept].tolist(), (head[:kept] / head[:kept].sum()).log().tolist(), strict=True))
    assert kept <= most and {one.token_ids[0] for one in drawn} <= expected.keys()
    for one in drawn:
        assert one.logprobs[0] == pytest.approx(expected[one.token_ids[0]], abs=1e-5)


def test_a_run_its_models_and_checkpoints(tiny_model: str, tmp_path: Path) -> None:
    """Their prompts, lengths and numbers are the run's; the newest checkpoint's responses are those of ``model/``."""
    run_here(short(tiny_model, tmp_path, "run") + "--algo grpo --train.steps 1 --train.learning_rate 1e-2")
    run = tmp_path / "run"
    few = ["--limit", 3, "--launch.device", "cpu"]
    assert generate(run, "--output", tmp_path / "a.jsonl", *few) == 0
    assert generate(run / "checkpoints" / "step-000001", "--output", tmp_path / "b.jsonl", *few) == 0
    assert generate(tiny_model, "--output", tmp_path / "c.jsonl", *few, "--data.task", "addition",
                    "--rollout.max_response_tokens", 6) == 0  # fmt: skip
    a, b, c = (response_files.read(tmp_path / f"{name}.jsonl") for name in "abc")
    assert a == b and len(a) == 3 and all(len(row["response_ids"]) <= 6 and row["answer"] for row in a)
    assert [row["prompt"] for row in c] == [row["prompt"] for row in a] and c != a
    shutil.rmtree(run / "model")
    assert generate(run, "--output", tmp_path / "d.jsonl", *few, "--prompts", "train") == 0
    assert response_files.read(tmp_path / "d.jsonl")[0]["prompt"] != a[0]["prompt"]


BAD = {
    "no model": (["./nowhere", "--output", "OUT.jsonl"], "there is no './nowhere'"),
    "format": (["MODEL", "--output", "OUT.csv"], "output: 'OUT.csv' must end with .jsonl or .parquet"),
    "no prompts": (["MODEL", "--output", "OUT.jsonl"], "data.path is missing"),
    "no held-out": (["MODEL", "--output", "OUT.jsonl", "--data.path", "DATA", "--prompts", "held_out"],
                    "prompts held_out: there are none"),
    "greedy twice": (["MODEL", "--output", "OUT.jsonl", "--data.path", "DATA", "--rollout.samples_per_prompt", "2",
                      "--generation.temperature", "0"], "rollout.samples_per_prompt above 1 needs"),
    "a training key": (["MODEL", "--output", "OUT.jsonl", "--train.steps", "3"], "unknown key 'train.steps'"),
    "too long": (["MODEL", "--output", "OUT.jsonl", "--data.path", "DATA", "--rollout.max_response_tokens", "200"],
                 "model: 'MODEL' has 128 positions, fewer than the longest prompt (7 tokens) and "
                 "rollout.max_response_tokens (200) take: lower rollout.max_response_tokens\n"),
    "too long together": (["MODEL", "--output", "OUT.jsonl", "--data.path", "DATA", "--rollout.max_response_tokens",
                           "127"], "model: 'MODEL' has 128 positions, fewer than the longest prompt (7 tokens) and "
                          "rollout.max_response_tokens (127) take: lower rollout.max_response_tokens or "
                          "rollout.max_prompt_tokens\n"),
    "a column": (["MODEL", "--output", "OUT.jsonl", "--data.path", "CLASH"],
                 "the data's column 'response' has the name"),
    "parquet": (["MODEL", "--output", "OUT.parquet", "--data.path", "MIXED",
                 "--rollout.max_response_tokens", "8"], "a .parquet file cannot hold"),
}  # fmt: skip


@pytest.mark.parametrize("words,line", BAD.values(), ids=BAD)
def test_what_cannot_work_is_one_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    files = {
        "DATA": users.write_rows(tmp_path / "data.jsonl", users.ROWS),
        "CLASH": users.write_rows(tmp_path / "clash.jsonl", [{"prompt": "a", "response": "b"}]),
        "MIXED": users.write_rows(tmp_path / "mixed.jsonl", [{"prompt": "a", "x": 1}, {"prompt": "a", "x": "b"}]),
        "MODEL": model,
        "OUT": tmp_path / "out",
    }

    def filled(text: str) -> str:
        for name, path in files.items():
            text = text.replace(name, str(path))
        return text

    assert generate(*map(filled, words)) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {filled(line)}") and said.count("\n") == 1
    assert not list(tmp_path.glob("*out*"))


def test_an_adapter_alone_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({}))
    assert generate(tmp_path, "--output", tmp_path / "out.jsonl") == 2
    assert "is an adapter without its base: export the run with --lora merged" in capsys.readouterr().err


@pytest.mark.slow
def test_vllm_truncates_as_transformers_does(tiny_model: str, tmp_path: Path) -> None:
    """In a process of its own: every token is one that the definition keeps, with its renormalised log-probability."""
    words = [tiny_model, "--data.task", "addition", "--limit", 6,
             "--rollout.samples_per_prompt", 4, "--rollout.max_response_tokens", 6,
             "--generation.backend", "vllm", "--generation.top_k", 5, "--generation.top_p", 0.6,
             "--generation.temperature", 0.8, "--output", tmp_path / "out.jsonl", "--launch.device", "cpu"]  # fmt: skip
    command = [sys.executable, "-m", "engine.generate", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=unranked(), timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = response_files.read(tmp_path / "out.jsonl")
    assert len(rows) == 24 and len({tuple(row["response_ids"]) for row in rows}) > 12
    whole, sampling = AutoModelForCausalLM.from_pretrained(tiny_model), Sampling(6, 0.8, (), top_p=0.6, top_k=5)
    for row in rows:
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        logits = whole(ids).logits[0, len(row["prompt_ids"]) - 1 : -1]
        kept = truncated(logits.float() / 0.8, sampling).log_softmax(-1)
        expected = kept.gather(1, torch.tensor(row["response_ids"])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(row["logprobs"]), expected, rtol=0, atol=2e-3)
