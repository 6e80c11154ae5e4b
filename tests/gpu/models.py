"""Models for the GPU tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def random_qwen2(folder: Path, **shape: Any) -> str:
    """Random bf16 weights of a Qwen2 of this shape (tied head, biases), with a word tokenizer over its first ids."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        **shape, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=0, dtype="bfloat16"
    )
    return _save(folder, Qwen2ForCausalLM, config)


def small_qwen2(folder: Path) -> str:
    """0.14 B parameters: 12 tensors a layer, the tied embedding and the last norm. A vocabulary that is not padded."""
    return random_qwen2(
        folder,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        vocab_size=50048,
        max_position_embeddings=1024,
    )


def random_gpt_neox(folder: Path, **shape: Any) -> str:
    """Likewise of a GPT-NeoX as Pythia has it: untied head, a quarter of each head rotated, parallel residuals."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        **shape, rotary_pct=0.25, use_parallel_residual=True, bos_token_id=None, eos_token_id=1, dtype="bfloat16"
    )
    return _save(folder, GPTNeoXForCausalLM, config)


def _save(folder: Path, kind: Any, config: Any) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(0)
    with torch.device("cuda"):
        kind(config).to(torch.bfloat16).save_pretrained(folder)
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, 2000)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    return str(folder)
