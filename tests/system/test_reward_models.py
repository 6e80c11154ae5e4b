"""Reward models as they are found in the wild: what their weights and files tell before they load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, LlamaConfig

from engine import rewards, run
from engine.config import Config, ConfigError
from tests import users

pytestmark = pytest.mark.usefixtures("without_pictures")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return users.model_folder(tmp_path_factory.mktemp("policy"))


def classifier(folder: Path, labels: int = 1) -> Path:
    """A random one with the policy's tokenizer."""
    config = LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=128, pad_token_id=0, num_labels=labels,
    )  # fmt: skip
    torch.manual_seed(2)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    users.tokenizer().save_pretrained(folder)
    return folder


def change_weights(folder: Path, **changes: Any) -> None:
    """Sets tensors, or takes them out where None is given; ``__`` stands for a dot."""
    weights = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        weights.pop(name.replace("__", "."), None)
        if tensor is not None:
            weights[name.replace("__", ".")] = tensor
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def forget(folder: Path, *keys: str) -> None:
    """Takes keys out of config.json."""
    file = folder / "config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in content.items() if key not in keys}))


def read(policy: Path, folder: Path, **sections: Any) -> rewards.Sources:
    return rewards.read(
        Config.model_validate(
            {
                "model": {"path": str(policy)},
                "reward": {"model": str(folder)},
                "rollout": {"max_prompt_tokens": 16, "max_response_tokens": 8},
            }
            | sections
        )
    )


@pytest.mark.parametrize("form", ["safetensors", "sharded", "bin"])
def test_labels_are_counted_by_the_weight_s_shape(tmp_path: Path, policy: Path, form: str) -> None:
    folder = classifier(tmp_path / "model")
    forget(folder, "id2label", "label2id", "num_labels")
    if form == "bin":
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    if form == "sharded":
        weights = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        parts = {"model-1.safetensors": list(weights)[:4], "model-2.safetensors": list(weights)[4:]}
        for file, names in parts.items():
            save_file({name: weights[name] for name in names}, folder / file, {"format": "pt"})
        index = {"metadata": {}, "weight_map": {name: file for file, names in parts.items() for name in names}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read(policy, folder).model is not None
    with pytest.raises(ConfigError, match="a classifier with 2 labels"):
        read(policy, classifier(tmp_path / "two", labels=2))


def test_a_run_with_one_whose_configuration_names_no_count(tmp_path: Path, policy: Path) -> None:
    folder = classifier(tmp_path / "model")
    forget(folder, "id2label", "label2id", "num_labels")
    given = users.arguments(tmp_path, policy, "--reward.model", str(folder), "--train.steps", "1")
    assert run.main(given) == 0


@pytest.mark.parametrize(
    "changes,needle",
    [
        ({"score__bias": torch.ones(1)}, "head is more than a matrix: .* has no score.bias"),
        ({"score__weight": None, "v_head__weight": torch.ones(1, 32)}, "no scoring head.*has v_head.weight instead"),
        ({"score__weight": None, "score__0__weight": torch.ones(8, 32)}, "no scoring head.*score.0.weight"),
        ({"regression_head__weight": torch.ones(1, 32)}, "has no regression_head.weight"),
        ({"lm_head__weight": torch.ones(16, 32)}, None),
        ({"score__weight": None, "lm_head__weight": torch.ones(16, 32)}, "no scoring head: it lacks"),
    ],
)
def test_heads_that_are_more_or_called_otherwise(
    tmp_path: Path, policy: Path, changes: dict[str, Any], needle: str | None
) -> None:
    folder = classifier(tmp_path / "model")
    change_weights(folder, **changes)
    if needle is None:
        read(policy, folder)
        return
    with pytest.raises(ConfigError, match=needle) as error:
        read(policy, folder)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "file,change,needle",
    [
        ("config.json", {"auto_map": {"AutoModelForSequenceClassification": "mine.Model"}}, "brings code of its own"),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["mine.T", None]}}, "brings code of its own"),
        ("config.json", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantised \(gptq\)"),
        ("config.json", {"model_type": "unheard_of"}, "reward.model"),
        ("config.json", {"max_position_embeddings": 20}, "takes 20 tokens at most"),
    ],
)
def test_what_cannot_be_loaded_is_refused_by_its_files(
    tmp_path: Path, policy: Path, capfd: pytest.CaptureFixture[str], file: str, change: dict[str, Any], needle: str
) -> None:
    folder = classifier(tmp_path / "model")
    users.edit_json(folder / file, **change)
    with pytest.raises(ConfigError, match=needle) as error:
        read(policy, folder)
    assert "\n" not in str(error.value)
    given = users.arguments(tmp_path, policy, "--reward.model", str(folder), "--rollout.max_prompt_tokens", "16")
    capfd.readouterr()
    assert run.main(given) == 2
    assert len(capfd.readouterr().err.splitlines()) == 1 and not (tmp_path / "runs/run").exists()
