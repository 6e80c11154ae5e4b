"""Addition of two two-digit numbers by a character-level Llama of about 0.6 M parameters.

``37+85=`` is answered by ``122`` and the end of sequence. All 10,000 problems are split once, by a fixed permutation,
into 4,096 held-out ones and the rest; no held-out problem is ever trained on.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedTokenizerBase

HELD_OUT = 4096
MAX_PROMPT_TOKENS = 7
"""``<bos>`` and six characters."""
MAX_RESPONSE_TOKENS = 6
"""Three digits and the end of sequence, with room to be wrong."""


def problems(split: str) -> list[dict[str, Any]]:
    """The rows of ``train`` or ``held_out``: ``prompt`` and the verifier's column ``answer``."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(20240615).shuffle(pairs)
    chosen = pairs[:HELD_OUT] if split == "held_out" else pairs[HELD_OUT:]
    return [{"prompt": f"{a:02d}+{b:02d}=", "answer": str(a + b)} for a, b in chosen]


def worked(split: str) -> list[dict[str, Any]]:
    """The same problems as rows to train on: ``prompt`` and ``completion``."""
    return [{"prompt": row["prompt"], "completion": row["answer"]} for row in problems(split)]


def preferences(split: str) -> list[dict[str, Any]]:
    """The same problems as pairs: ``prompt``, the right answer as ``chosen`` and one that is off as ``rejected``."""
    rows = problems(split)
    wrong = [str(int(row["answer"]) + (1 if place % 2 else 10)) for place, row in enumerate(rows)]
    return [
        {"prompt": row["prompt"], "chosen": row["answer"], "rejected": answer}
        for row, answer in zip(rows, wrong, strict=True)
    ]


def verify(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1.0 for a completion that is the answer and nothing else, 0.0 for any other."""
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]


def tokenizer() -> PreTrainedTokenizerBase:
    """One token a character; encoding puts ``<bos>`` in front."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *"0123456789+="])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def model_config() -> LlamaConfig:
    """Three layers of width 128, 0.64 M parameters."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=15, hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip
