"""Prompts: loading, tokenizing, and shuffled epochs with a cursor that a checkpoint can hold."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import Config, ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt and its row of the data set."""

    ids: list[int]
    text: str
    columns: dict[str, Any]


class PromptStream:
    """Endless shuffled epochs over a list of prompts (the ``repeat_generator`` of async_rlhf, with a cursor).

    The order of an epoch depends on the seed and the epoch's number alone, so ``cursor`` (prompts taken so far) is all
    the state there is: setting it continues where another process stopped.
    """

    def __init__(self, prompts: list[Prompt], seed: int, shuffle: bool = True) -> None:
        if not prompts:
            raise ConfigError("no prompt is left to train on: data is empty, or rollout.max_prompt_tokens is too small")
        self._prompts, self._seed, self._shuffle = prompts, seed, shuffle
        self._order: tuple[int, list[int]] = (-1, [])
        self.cursor = 0

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self.cursor / len(self._prompts)

    def take(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts; every prompt of an epoch comes once before any comes again."""
        batch = []
        for position in range(self.cursor, self.cursor + count):
            epoch, index = divmod(position, len(self._prompts))
            batch.append(self._prompts[self._epoch_order(epoch)[index]])
        self.cursor += count
        return batch

    def _epoch_order(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            order = list(range(len(self._prompts)))
            if self._shuffle:
                random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1]


def load_tokenizer(path: str, key: str = "model.path") -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub name, of the class its own files name.

    ``AutoTokenizer`` picks a class by the model's type where it knows one, and a tokenizer of the wrong class encodes
    every text to nothing; a folder that says its tokenizer is a plain ``tokenizers`` one is believed.

    Args:
        key: the setting that named it, for messages.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    settings = Path(path) / "tokenizer_config.json"
    try:
        declared = json.loads(settings.read_text(encoding="utf-8")).get("tokenizer_class") if settings.is_file() else ""
        plain = declared in ("PreTrainedTokenizerFast", "TokenizersBackend")
        return (PreTrainedTokenizerFast if plain else AutoTokenizer).from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # OSError, ValueError, …, and the tokenizers library raises Exception itself
        said = " ".join(str(error).split())
        if "trust_remote_code" in said:
            raise ConfigError(
                f"{key}: the tokenizer of '{path}' brings code of its own (auto_map in tokenizer_config.json), and "
                "Tandem runs none: take a model with a tokenizer that transformers has built in"
            ) from error
        raise ConfigError(f"{key} '{path}' has no tokenizer to load: {type(error).__name__}: {said:.200}") from error


def load(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Prompt], list[Prompt], list[str]]:
    """Training prompts, held-out prompts, and notes for the person (how many were dropped, and why).

    Raises:
        ConfigError: unreadable file, missing column, or a prompt that encodes to nothing.
    """
    notes: list[str] = []
    train = _encode(_rows(config, held_out=False), config, tokenizer, "training", notes)
    held_out = _encode(_rows(config, held_out=True), config, tokenizer, "held-out", notes, config.eval.prompts)
    return train, held_out, notes


def _rows(config: Config, held_out: bool) -> Iterator[dict[str, Any]]:
    data = config.data
    if data.task is not None:
        from engine.tasks import addition

        yield from addition.problems("held_out" if held_out else "train")
    elif held_out and data.eval_path is None and data.eval_split is None:
        return
    else:
        path, name = (data.eval_path, data.eval_name) if held_out and data.eval_path else (data.path, data.name)
        split = (data.eval_split or data.split) if held_out else data.split
        assert path is not None
        try:
            yield from _read(path, name, split)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        except Exception as error:  # whatever the reader of that format says
            raise ConfigError(
                f"{path} cannot be read: {type(error).__name__}: {' '.join(str(error).split())}"
            ) from error


def _read(path: str, name: str | None, split: str) -> Iterator[dict[str, Any]]:
    if path.endswith(".jsonl"):
        with open(path, encoding="utf-8-sig", newline="\n") as file:  # JSON strings may hold other line separators
            for number, line in enumerate(file, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ConfigError(f"line {number} must be an object with columns")
                    yield row
    elif path.endswith(".parquet"):
        import pyarrow.parquet

        yield from pyarrow.parquet.read_table(path).to_pylist()
    else:
        try:
            import datasets
        except ImportError:
            raise ConfigError(
                "neither a .jsonl nor a .parquet file; a Hugging Face data set needs: pip install datasets"
            ) from None
        yield from datasets.load_dataset(path, name, split=split)


def _encode(
    rows: Iterator[dict[str, Any]],
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    kind: str,
    notes: list[str],
    limit: int | None = None,
) -> list[Prompt]:
    prompts: list[Prompt] = []
    too_long, column = 0, config.data.prompt_column
    for number, row in enumerate(rows):
        if limit is not None and len(prompts) == limit:
            break
        if column not in row:
            raise ConfigError(
                f"{kind} row {number} has no column '{column}' (data.prompt_column); it has {', '.join(row)}"
            )
        ids = encode_prompt(row[column], tokenizer, config.data.chat_template)
        if not ids:
            raise ConfigError(
                f"{kind} row {number}: the prompt {row[column]!r} encodes to no token with this tokenizer"
            )
        if len(ids) > config.rollout.max_prompt_tokens:
            too_long += 1
            continue
        prompts.append(Prompt(ids, str(tokenizer.decode(ids, skip_special_tokens=True)), row))
    if too_long:
        notes.append(
            f"{too_long} {kind} prompts were dropped: longer than rollout.max_prompt_tokens "
            f"({config.rollout.max_prompt_tokens})"
        )
    return prompts


def encode_prompt(prompt: Any, tokenizer: PreTrainedTokenizerBase, chat_template: bool) -> list[int]:
    """Token ids of a prompt: a string, a list of chat messages, or token ids as they are.

    A chat template writes the beginning-of-sequence token itself, so the tokenizer does not add a second one.
    """
    if isinstance(prompt, str) and chat_template:
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        return list(prompt)
    if isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt):
        if tokenizer.chat_template is None:
            raise ConfigError("chat messages need a tokenizer with a chat template; this one has none")
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    raise ConfigError(
        f"a prompt must be a string, chat messages or token ids, not {type(prompt).__name__}: {prompt!r:.80}"
    )
