"""What is no input for a command, for every command that can meet it: one line, before any weights load."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig, PreTrainedModel

import engine.evaluate
import engine.export
import engine.generate
import engine.relabel
import engine.run
import engine.serve_reward
from tests import users
from tests.system.test_relabel import reward_model

PAIRS = [{"prompt": "a b", "chosen": "c", "rejected": "d e"}, {"prompt": "a c", "chosen": "d e f", "rejected": "g"}]
ROWS = {
    "pairs": PAIRS,
    "given": [{"prompt": "a b", "completion": "c d"}] * 2,
    "same": [*PAIRS, {"prompt": "a", "chosen": "b", "rejected": "b"}],
    "same tokens": [*PAIRS, {"prompt": "a", "chosen": "b", "rejected": "b "}],
    "empty": [*PAIRS, {"prompt": "a", "chosen": "b", "rejected": ""}],
    "blank": [*PAIRS, {"prompt": "a", "chosen": "b", "rejected": "  "}],
    "no completion": [{"prompt": "a b", "completion": "c d"}] * 2 + [{"prompt": "a", "completion": ""}],
    "blank completion": [{"prompt": "a b", "completion": "c d"}] * 2 + [{"prompt": "a", "completion": " "}],
}
COMMANDS = {
    "run": engine.run.main,
    "generate": engine.generate.main,
    "evaluate": engine.evaluate.main,
    "relabel": engine.relabel.main,
    "serve": engine.serve_reward.main,
    "export": engine.export.main,
}
RUN = "--output_dir OUT --name r --train.steps 1 --train.rows_per_step 2 --data.max_row_tokens 32"
SAMPLED = "--data.path ROWS/given.jsonl --rollout.max_response_tokens 8"
EVALUATE = f"{SAMPLED} --output OUT/judged"
RELABEL = "--data.path ROWS/pairs.jsonl --output OUT/new.jsonl"
PPO = "run --algo ppo --data.path ROWS/given.jsonl --output_dir OUT --name r --train.steps 1 "
PPO += "--rollout.max_prompt_tokens 8 --rollout.max_response_tokens 8"

LAST = "line 3 (row 2 counted from 0): "
SAME, EMPTY = f"{LAST}chosen and rejected are the same: there", f"{LAST}rejected is empty: there is nothing"
WRITES, NO_HEAD, TWO = "is a reward model: it writes nothing", "has no scoring head", "is a classifier with 2 labels"
NO_MODEL, POLICY = (
    "no config.json; that of a run is 'RUNS/gold/model'",
    "RUNS/sft trained is a policy: it gives no score",
)
TRAINED = "what RUNS/gold trained is a reward model: it writes nothing"
CHECKPOINT = "checkpoints/step-000001' is no model folder, it has no config.json; engine.export makes one"
CASES = [
    *[
        (f"run --algo {algo} --model.path POLICY {data} {RUN}", line)
        for algo in ("dpo", "reward_model")
        for data, line in (
            ("--data.path ROWS/same.jsonl", SAME),
            ("--data.path ROWS/pairs.jsonl --data.eval_path ROWS/same.jsonl", SAME),
            ("--data.path 'ROWS/same tokens.jsonl'", f"{LAST}chosen and rejected are the same tokens"),
            ("--data.path ROWS/empty.jsonl", EMPTY),
            ("--data.path ROWS/blank.jsonl", f"{LAST}a completion encodes to no token"),
        )
    ],
    ("relabel --data.path ROWS/same.jsonl --reward.model REWARD --output OUT/new.jsonl", SAME),
    ("relabel --data.path ROWS/empty.jsonl --reward.model REWARD --output OUT/new.jsonl", EMPTY),
    (f"run --algo sft --model.path POLICY --data.path 'ROWS/no completion.jsonl' {RUN}", f"{LAST}the completion is"),
    (f"run --algo sft --model.path POLICY --data.path 'ROWS/blank completion.jsonl' {RUN}", f"{LAST}a completion enc"),
    # a reward model, or any classifier, where a policy belongs
    (f"run --algo sft --model.path REWARD --data.path ROWS/given.jsonl {RUN}", "model.path: 'REWARD' (llama) is"),
    (f"run --algo dpo --model.path TWO --data.path ROWS/pairs.jsonl {RUN}", WRITES),
    (f"run --algo dpo --model.path POLICY --model.reference_path REWARD --data.path ROWS/pairs.jsonl {RUN}", WRITES),
    (f"generate REWARD {SAMPLED} --output OUT/new.jsonl", WRITES),
    (f"evaluate REWARD {EVALUATE} --reward.model REWARD", WRITES),
    (f"evaluate POLICY REWARD {EVALUATE} --reward.model REWARD", WRITES),
    (f"evaluate POLICY {EVALUATE} --reward.model REWARD --reference TWO", WRITES),
    *[
        (f"generate RUNS/gold{place} {SAMPLED} --output OUT/new.jsonl", TRAINED)
        for place in ("", "/model", "/checkpoints/step-000001")
    ],
    (f"evaluate RUNS/gold {EVALUATE} --reward.model REWARD", TRAINED),
    # anything else where a reward model belongs
    *[
        (words.replace("MODEL", model), line)
        for model, line in (
            ("POLICY", NO_HEAD),
            ("TWO", TWO),
            ("OUT/none", "reward.model: there is no 'OUT/none'"),
            ("ROWS/pairs.jsonl", "reward.model: 'ROWS/pairs.jsonl' is a file"),
            ("RUNS/gold", NO_MODEL),
            ("RUNS/gold/checkpoints/step-000001", CHECKPOINT),
        )
        for words in (
            f"{PPO} --model.path POLICY --reward.model MODEL",
            f"evaluate POLICY {EVALUATE} --reward.model MODEL",
            f"relabel {RELABEL} --reward.model MODEL",
        )
    ],
    (f"run --algo reward_model --model.path TWO --data.path ROWS/pairs.jsonl {RUN}", TWO),
    (f"{PPO} --model.path POLICY --reward.model REWARD --model.value_path TWO", f"model.value_path: 'TWO' {TWO}"),
    ("serve POLICY --port 0", NO_HEAD),
    ("serve TWO --port 0", TWO),
    *[(f"serve RUNS/sft{place} --port 0", POLICY) for place in ("", "/model", "/checkpoints/step-000001")],
    # a run's folder or a checkpoint where a model belongs, a model where a run does
    (f"run --algo sft --model.path RUNS/gold --data.path ROWS/given.jsonl {RUN}", NO_MODEL),
    (f"relabel {RELABEL} --reward.model REWARD --model.path RUNS/sft/checkpoints/step-000001", CHECKPOINT),
    ("export POLICY --output OUT/new", "is neither a run's folder nor one of its checkpoints"),
]  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Rows, models, and a run of each kind, by their names above."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "rows").mkdir()
    for name, rows in ROWS.items():
        users.write_rows(folder / f"rows/{name}.jsonl", rows)
    two = LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_labels=2,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(two).save_pretrained(folder / "two")
    users.tokenizer().save_pretrained(folder / "two")
    found = {"ROWS": folder / "rows", "RUNS": folder / "runs", "TWO": folder / "two"}
    found |= {"POLICY": users.model_folder(folder / "policy"), "REWARD": reward_model(folder / "reward")}
    return {name: str(path) for name, path in found.items()}


@pytest.fixture(scope="module")
def runs(inputs: dict[str, str]) -> Path:
    folder = Path(inputs["RUNS"])
    with pytest.MonkeyPatch.context() as patch:
        from engine.report import figures

        patch.setattr(figures, "write_figures", lambda *_: None)
        for algo, name, rows in (("sft", "sft", "given"), ("reward_model", "gold", "pairs")):
            words = f"--algo {algo} --model.path POLICY --data.path ROWS/{rows}.jsonl {RUN} --launch.device cpu"
            words = words.replace("OUT --name r", f"RUNS --name {name}")
            assert engine.run.main(filled(words, inputs).split()) == 0
    return folder


def filled(text: str, inputs: dict[str, str]) -> str:
    for name, path in inputs.items():
        text = text.replace(name, path)
    return text


def refusal(words: str, inputs: dict[str, str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command says to this."""
    capsys.readouterr()
    command, *rest = shlex.split(filled(words, inputs))
    device = [] if command == "export" else ["--launch.device", "cpu"]
    assert COMMANDS[command]([*rest, *device]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and said.err.count("\n") == 1, said.err
    return said.err


@pytest.mark.parametrize("words,line", CASES, ids=[words for words, _ in CASES])
def test_is_refused_before_anything_loads(
    inputs: dict[str, str],
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    line: str,
) -> None:
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", lambda *_, **__: pytest.fail("weights were loaded"))
    places = inputs | {"OUT": str(tmp_path)}
    assert filled(line, places) in refusal(words, places, capsys)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "words",
    [
        "run --resume RUNS/sft --train.steps 2",
        "export RUNS/sft --output OUT/new",
        f"generate RUNS/sft/checkpoints/step-000001 {SAMPLED} --output OUT/new.jsonl",
        f"evaluate RUNS/sft/checkpoints/step-000001 {EVALUATE} --reward.model REWARD",
        "serve RUNS/gold/checkpoints/step-000001 --port 0",
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    inputs: dict[str, str], runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    """That it is another one shows when the model that the run began with is read, and before a run goes on."""
    policy, kept = Path(inputs["POLICY"]), tmp_path / "kept"
    shutil.move(policy, kept)
    try:
        users.model_folder(policy, hidden_size=64)
        line = refusal(words, inputs | {"OUT": str(tmp_path)}, capsys)
    finally:
        shutil.rmtree(policy)
        shutil.move(kept, policy)
    assert "holds other weights, or another configuration, than when" in line
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
