"""A user's model folder: what it says is what happens, or one line says why not, before the run has a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

import engine.run
from engine.generation.hf import HFGenerator
from engine.start import bootstrap
from tests import users
from tests.system.helpers import steps

pytestmark = pytest.mark.usefixtures("without_pictures")
SMALL = {"vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = SMALL | {"intermediate_size": 64, "num_key_value_heads": 2}


def run(folder: Path, model: Path, *more: str) -> int:
    return engine.run.main(users.arguments(folder, model, "--train.steps", "1", *more))


def refused(capsys: pytest.CaptureFixture[str], folder: Path, status: int) -> str:
    """The one line of a refusal, which left no folder."""
    said = capsys.readouterr().err
    assert status == 2 and said.startswith("error: ") and said.count("\n") == 1, said
    assert not list((folder / "runs").glob("*")), "no run folder"
    return said


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return users.model_folder(tmp_path / "model")


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.6, "top_p": 0.9},
        {"do_sample": True, "temperature": 0.6, "top_k": 5, "repetition_penalty": 1.3},
        {"num_beams": 3, "early_stopping": True, "length_penalty": 0.5},
        {"do_sample": False, "top_k": 50, "max_new_tokens": 7},
    ],
)
def test_generation_settings_are_handed_on_as_they_are(tmp_path: Path, model: Path, settings: dict) -> None:
    """They neither change the sampling nor keep the policy from being saved."""
    users.edit_json(model / "generation_config.json", eos_token_id=2, **settings)
    assert run(tmp_path, model) == 0
    exported = tmp_path / "runs" / "run" / "model"
    assert json.loads((exported / "generation_config.json").read_text()) == json.loads(
        (model / "generation_config.json").read_text()
    )
    assert GenerationConfig.from_pretrained(exported).eos_token_id == 2
    AutoModelForCausalLM.from_pretrained(exported)


def test_what_cannot_be_saved_is_refused_at_start(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(self: Any, *args: Any, **kwargs: Any) -> None:
        raise ValueError("this tokenizer cannot\nbe written")

    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "save_pretrained", no_room)
    assert "this tokenizer cannot be written" in refused(capsys, tmp_path, run(tmp_path, model))


GPT2 = {"vocab_size": 16, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48}


@pytest.mark.parametrize("kind,options", [("GPT2", GPT2), ("Llama", WIDE | {"max_position_embeddings": 48})])
@pytest.mark.parametrize("algo", ["grpo", "ppo"])
def test_positions_must_hold_prompt_and_response(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, options: dict, algo: str
) -> None:
    """Of the longest prompt there is, not of the longest that would be allowed."""
    model = users.model_folder(tmp_path / "m", getattr(transformers, f"{kind}Config")(**options))
    longest = max(len(users.tokenizer()(row["prompt"])["input_ids"]) for row in users.ROWS)
    short = ("--algo", algo, "--rollout.max_response_tokens", str(48 - longest))
    assert run(tmp_path, model, *short, "--name", "short") == 0
    (tmp_path / "runs" / "short").rename(tmp_path / "kept")
    long = ("--algo", algo, "--rollout.max_response_tokens", str(49 - longest))
    said = refused(capsys, tmp_path, run(tmp_path, model, *long))
    assert "model.path" in said and "48 positions" in said and "rollout.max_response_tokens" in said


def test_a_short_value_model_is_refused_too(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = users.model_folder(tmp_path / "value", max_position_embeddings=8)
    more = ("--algo", "ppo", "--model.value_path", str(value))
    assert "model.value_path" in refused(capsys, tmp_path, run(tmp_path, model, *more))


@pytest.mark.parametrize("kind", ["Mistral", "Qwen2", "Starcoder2", "Gemma3Text"])
def test_sliding_windows_shorter_than_the_sequences_work(tmp_path: Path, kind: str) -> None:
    """Sampler and trainer agree, and the trainer's packed attention was compared with transformers'."""
    options = WIDE | {"sliding_window": 6, "max_position_embeddings": 128}
    if kind == "Qwen2":
        options |= {"use_sliding_window": True, "max_window_layers": 0}
    model = users.model_folder(tmp_path / "m", getattr(transformers, f"{kind}Config")(**options))
    assert run(tmp_path, model, "--generation.max_logprob_gap", "1e-5", "--rollout.max_response_tokens", "24") == 0


def test_router_logits_are_no_obstacle(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(**WIDE, num_local_experts=4, output_router_logits=True)
    model = users.model_folder(tmp_path / "m", config)
    assert run(tmp_path, model) == 0
    assert AutoConfig.from_pretrained(tmp_path / "runs" / "run" / "model").output_router_logits is True


def test_other_numbers_than_the_checkpoints_are_said(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(model)
    assert run(tmp_path, model, "--name", "wide") == 0
    said = capsys.readouterr().out
    assert "model.path holds bfloat16 weights and model.dtype is float32" in said and "model/" in said
    assert load_file(tmp_path / "runs/wide/model/model.safetensors")["lm_head.weight"].dtype == torch.float32
    assert run(tmp_path, model, "--name", "narrow", "--model.dtype", "bfloat16") == 0
    assert "weights and model.dtype" not in capsys.readouterr().out
    assert load_file(tmp_path / "runs/narrow/model/model.safetensors")["lm_head.weight"].dtype == torch.bfloat16


LEAKING = {
    "Bloom": {"vocab_size": 16, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "Lfm2": WIDE | {"layer_types": ["conv", "full_attention"]},
    "Mamba": {"vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "XGLM": {"vocab_size": 16, "d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4},
    "Falcon": SMALL,
    "Mpt": {"vocab_size": 16, "d_model": 32, "n_layers": 2, "n_heads": 4},
}
CHANGED = {
    "Cohere": WIDE,
    "Granite": WIDE | {"logits_scaling": 8.0},
    "Gemma2": WIDE | {"head_dim": 8},
    "Bert": SMALL | {"intermediate_size": 64, "is_decoder": True},
    "GPTNeo": {"vocab_size": 16, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 8,
               "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64},
    "GPTJ": {"vocab_size": 16, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64},
}  # fmt: skip
RIGHT = {
    "GPT2": GPT2,
    "GPTNeoX": SMALL | {"intermediate_size": 64},
    "OPT": SMALL | {"ffn_dim": 64, "word_embed_proj_dim": 16, "max_position_embeddings": 64},
    "Qwen3Moe": WIDE | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [*LEAKING, *CHANGED])
def test_models_that_would_compute_something_else_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str
) -> None:
    """By what they do and not by a list, and before the sampler starts."""
    monkeypatch.setattr(HFGenerator, "__init__", lambda *_, **__: pytest.fail("the sampler was started"))
    config = getattr(transformers, f"{kind}Config")(**(LEAKING | CHANGED)[kind])
    model = users.model_folder(tmp_path / "m", config)
    said = refused(capsys, tmp_path, run(tmp_path, model, "--model.dtype", dtype))
    assert "model.path" in said and "cannot be used here" in said and kind in said


@pytest.mark.parametrize("algo", ["grpo", "ppo"])
@pytest.mark.parametrize("kind", RIGHT)
def test_models_whose_attention_can_be_replaced_work(tmp_path: Path, kind: str, algo: str) -> None:
    model = users.model_folder(tmp_path / "m", getattr(transformers, f"{kind}Config")(**RIGHT[kind]))
    value = users.model_folder(tmp_path / "v")
    more = ("--algo", algo, *(("--model.value_path", str(value)) if algo == "ppo" else ()))
    assert run(tmp_path, model, *more, "--generation.max_logprob_gap", "1e-5") == 0
    assert steps(tmp_path / "runs" / "run")[0]["policy/grad_norm"] > 0


def _fp8(model: Path) -> None:
    state = load_file(model / "model.safetensors")
    for name, tensor in list(state.items()):
        if "proj" in name:
            state[name] = tensor.to(torch.float8_e4m3fn)
            state[f"{name}_scale_inv"] = torch.ones(1, 1)
    save_file(state, model / "model.safetensors", {"format": "pt"})


def _int8(model: Path) -> None:
    state = load_file(model / "model.safetensors")
    state["model.layers.0.mlp.up_proj.weight"] = torch.zeros(64, 32, dtype=torch.int8)
    save_file(state, model / "model.safetensors", {"format": "pt"})


def _declared(method: str) -> Callable[[Path], None]:
    return lambda model: users.edit_json(model / "config.json", quantization_config={"quant_method": method, "bits": 4})


def _own_code(model: Path) -> None:
    users.edit_json(
        model / "config.json", model_type="mine", auto_map={"AutoConfig": "m.C", "AutoModelForCausalLM": "m.M"}
    )
    (model / "m.py").write_text("raise SystemExit('this ran')\n")


def _own_tokenizer(model: Path) -> None:
    users.edit_json(
        model / "tokenizer_config.json", tokenizer_class="Mine", auto_map={"AutoTokenizer": ["t.Mine", None]}
    )
    (model / "t.py").write_text("raise SystemExit('this ran')\n")


def _not_a_number(model: Path) -> None:
    state = load_file(model / "model.safetensors")
    state["model.norm.weight"][3] = torch.nan
    save_file(state, model / "model.safetensors", {"format": "pt"})


def test_weights_that_are_no_numbers_are_called_that(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _not_a_number(model)
    assert "NaN" in refused(capsys, tmp_path, run(tmp_path, model))


def _torn(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def _half_indexed(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    places = {
        "lm_head.weight": "model-00001-of-00002.safetensors",
        "model.norm.weight": "model-00002-of-00002.safetensors",
    }
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "float8 with scales": (_fp8, "quantised"),
    "int8": (_int8, "quantised"),
    **{method: (_declared(method), method) for method in ("gptq", "awq", "bitsandbytes", "fp8", "compressed-tensors")},
    "model code": (_own_code, "code of its own"),
    "tokenizer code": (_own_tokenizer, "code of its own"),
    "no weights": (lambda model: (model / "model.safetensors").unlink(), "has no weights"),
    "torn weights": (_torn, "fetch the model again"),
    "empty weights": (lambda model: (model / "model.safetensors").write_bytes(b""), "fetch the model again"),
    "half of the weights": (_half_indexed, "model-00002-of-00002.safetensors"),
    "no configuration": (lambda model: (model / "config.json").unlink(), "config.json"),
    "torn configuration": (lambda model: (model / "config.json").write_text('{"model_type": "ll'), "config.json"),
    "unknown kind": (lambda model: users.edit_json(model / "config.json", model_type="llamma"), "llamma"),
    "an encoder": (lambda model: transformers.T5Config().save_pretrained(model), "no causal language model"),
    "no tokenizer": (lambda model: [file.unlink() for file in model.glob("tokenizer*")], "tokenizer"),
    "torn tokenizer": (lambda model: (model / "tokenizer.json").write_text("{"), "tokenizer"),
}


@pytest.mark.parametrize("fault", FOLDERS)
def test_a_faulty_folder_is_refused_before_weights_load(
    tmp_path: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    """And nobody is asked anything, though somebody is there."""
    spoil, needle = FOLDERS[fault]
    spoil(model)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were loaded"))
    said = refused(capsys, tmp_path, run(tmp_path, model))
    assert needle in said and ("model.path" in said or str(model) in said)


@pytest.mark.slow
def test_the_embedded_start_does_not_depend_on_the_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing cached: the supervised phase is of no schedule and has no value model, whatever the run has."""
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(bootstrap, "STOP_AT", -1.0)
    monkeypatch.setattr(bootstrap, "CHECK_EVERY", 1)
    for seed, algo in enumerate(("ppo", "rloo")):
        more = ("--rollout.prompts_per_step", "4", "--eval.prompts", "8", "--train.steps", "1", "--seed", str(seed))
        task = ("--data.task", "addition", "--schedule.staleness", "1", "--output_dir", str(tmp_path))
        assert engine.run.main(["--algo", algo, *task, *more, "--name", algo]) == 0


@pytest.mark.parametrize(
    "more,key",
    [
        ((), "model.path"),
        (("--lora.rank", "2"), "model.path"),
        (("--algo", "ppo", "--model.value_path", "VALUE"), "model.value_path"),
        (("--model.reference_path", "VALUE"), "model.reference_path"),
    ],
)
def test_another_base_model_is_not_resumed_from(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], key: str
) -> None:
    """Its folder has the same name and shapes and other weights: with LoRA it would be half of another model."""
    other = users.model_folder(tmp_path / "other")
    kept = tmp_path / "runs" / "run"
    assert run(tmp_path, model, *(one.replace("VALUE", str(other)) for one in more)) == 0
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in kept.rglob("*")}
    file = (model if key == "model.path" else other) / "model.safetensors"
    content, state = file.read_bytes(), load_file(file)
    state["model.norm.weight"][3] += 1e-3
    save_file(state, file, {"format": "pt"})
    capsys.readouterr()
    resume = ["--resume", str(kept), "--train.steps", "2"]
    assert engine.run.main(resume) == 2
    said = capsys.readouterr().err
    assert key in said and "other weights" in said and said.count("\n") == 1
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in kept.rglob("*")} == before
    file.write_bytes(content)
    assert engine.run.main(resume) == 0


def test_the_same_weights_of_another_configuration_are_another_model(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, model) == 0
    resume = ["--resume", str(tmp_path / "runs" / "run"), "--train.steps", "2"]
    users.edit_json(model / "config.json", rms_norm_eps=1e-3)
    capsys.readouterr()
    assert engine.run.main(resume) == 2
    assert "model.path holds other weights, or another configuration" in capsys.readouterr().err
