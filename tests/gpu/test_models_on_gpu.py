"""Models are compared with transformers on a GPU too, where other kernels compute attention and products."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from engine.config import ConfigError
from engine.training import models
from tests import users
from tests.system.test_model_folders import CHANGED, GPT2, LEAKING, WIDE

pytestmark = pytest.mark.gpu
RIGHT = {
    "Llama": WIDE,
    "Qwen2": WIDE,
    "Mistral": WIDE | {"sliding_window": 8},
    "GPT2": GPT2,
    "Qwen3Moe": WIDE | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [*RIGHT, *LEAKING, *CHANGED])
def test_what_a_model_computes_is_compared(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    """Tiny random models: what leaks is far below the rounding of 16-bit numbers, and is seen all the same."""
    config = getattr(transformers, f"{kind}Config")(**(RIGHT | LEAKING | CHANGED)[kind])
    folder = str(users.model_folder(tmp_path / "m", config))
    check = models.Check(f"model.path '{folder}'", torch.device("cuda"))
    if kind not in RIGHT:
        with pytest.raises(ConfigError, match="cannot be used here"):
            models.load_policy(folder, dtype=dtype, check=check)
        return
    policy = models.load_policy(folder, dtype=dtype, check=check)
    assert {parameter.device.type for parameter in policy.parameters()} == {"cpu"}, "training has the GPU next"
    models.load_value(folder, dtype=dtype, check=check)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spread", [1.0, 10.0])
def test_peaked_logits_of_a_large_vocabulary_are_no_difference(
    tmp_path: Path, dtype: torch.dtype, spread: float
) -> None:
    """Logits that transformers rounds to 16 bits and the fused head does not."""
    shape = {"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 4,
             "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": False}  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**shape))
    with torch.no_grad():
        model.lm_head.weight.mul_(spread / float(model.lm_head.weight.std()) / 896**0.5)
    model.save_pretrained(tmp_path)
    models.load_policy(str(tmp_path), dtype=dtype, check=models.Check("model.path", torch.device("cuda")))
