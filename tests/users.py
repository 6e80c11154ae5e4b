"""What a user brings: a model folder, prompts, a reward. Tests change one thing of it and say what must come of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORDS = "abcdefgh"
VOCABULARY = ["<pad>", "<s>", "</s>", "<turn>", "<unk>", "<u5>", "<u6>", "<u7>", *WORDS]
"""16 tokens; words are split at whitespace."""
REWARD = "def score(prompts, completions, **columns):\n    return [float(len(text)) for text in completions]\n"
ROWS = [{"prompt": "a b c", "answer": "d"}] + [
    {"prompt": " ".join(WORDS[(i + j) % 8] for j in range(3 + i % 4)), "answer": WORDS[i % 8]} for i in range(15)
]


def tokenizer() -> Any:
    """Of words at whitespace; encoding puts ``<s>`` in front."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<turn>"],
    )


def model_folder(folder: Path, config: Any = None, **changes: Any) -> Path:
    """A random model with the tokenizer above, saved in ``folder``: a Llama, unless another configuration is given.

    ``changes`` are of the configuration: of the Llama's, or of the given one.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = config or LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # some kinds have others by themselves
    for name, value in (ends | changes).items():
        setattr(config, name, value)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def edit_json(file: Path, **changes: Any) -> None:
    """Sets keys of a JSON file, which is made if it is not there."""
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | changes))


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    """A .jsonl file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def arguments(folder: Path, model: Path, *more: str, rows: list[dict[str, Any]] | None = None) -> list[str]:
    """The command line of a small GRPO run in ``folder`` with its prompts and reward, and further options."""
    data = write_rows(folder / "data.jsonl", ROWS if rows is None else rows)
    reward = folder / "reward.py"
    if not reward.exists():
        reward.write_text(REWARD)
    base = {
        "algo": "grpo",
        "model.path": model,
        "data.path": data,
        "reward.function": f"{reward}:score",
        "output_dir": folder / "runs",
        "name": "run",
        "rollout.prompts_per_step": 4,
        "rollout.samples_per_prompt": 4,
        "rollout.max_prompt_tokens": 32,
        "rollout.max_response_tokens": 8,
        "train.steps": 2,
        "launch.device": "cpu",
    }
    given = {one.removeprefix("--") for one in more if one.startswith("--")}
    return [part for key, value in base.items() if key not in given for part in (f"--{key}", str(value))] + list(more)
