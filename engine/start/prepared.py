"""The folder that a run's policy starts from; of a model that gets new tokens it is a copy that has rows for them."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import Config, ConfigError
from engine.data import policy_tokens
from engine.data.end_of_sequence import stop_token_ids
from engine.data.prompts import load_tokenizer
from engine.machine import disk
from engine.machine.world import World
from engine.models import vocabulary, weight_files
from engine.start import bootstrap
from engine.training import export

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase


def policy(config: Config, world: World, say: Callable[[str], None]) -> str:
    """The folder or hub name of the policy that the run starts from. Collective.

    Raises:
        ConfigError: ``model.path`` cannot be loaded; on every rank.
    """
    if config.model.path is None:
        return bootstrap.starting_policy(config, world, say)
    if not config.data.changes_tokenizer:
        return config.model.path
    found: str | ConfigError = ""
    if world.main:
        try:
            found = copied(config, say)
        except ConfigError as error:
            found = error
    found = world.broadcast(found)
    if isinstance(found, ConfigError):
        raise found
    return found


def copied(config: Config, say: Callable[[str], None]) -> str:
    """The folder of a copy of ``model.path`` with the tokens of ``data``, made on the first call.

    It is kept under ``$TANDEM_CACHE`` (default ``~/.cache/tandem``), by what it was made of. A model that has all these
    tokens already, as one that a run has written, is itself what is needed.
    """
    assert config.model.path is not None
    tokenizer = policy_tokens.of_run(config)
    if _described(tokenizer) == _described(load_tokenizer(config.model.path)):
        return config.model.path
    cache = Path(os.environ.get("TANDEM_CACHE", "~/.cache/tandem")).expanduser()
    folder = cache / f"prepared-{_key(config.model.path, tokenizer)}"
    if (folder / "config.json").is_file():
        return str(folder)
    say(f"Writing a copy of {config.model.path} with the tokens and template of data to {folder}")
    with disk.writing(folder):
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix="made-", dir=cache))
        try:
            _write(config, tokenizer, made / "model")
        except BaseException:
            disk.remove(made)
            raise
        bootstrap.publish(made, folder)
    return str(folder)


def _key(path: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of the model's files, as far as names, sizes and times tell, and of the whole tokenizer."""
    if Path(path).is_dir():
        stats = [(file.name, file.stat()) for file in sorted(Path(path).iterdir()) if file.is_file()]
        source: Any = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    else:  # a file of the hub's cache lies in a folder that is named after its commit
        source = str(weight_files.locate(path, "config.json"))
    text = json.dumps([path, source]) + _described(tokenizer)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _described(tokenizer: PreTrainedTokenizerBase) -> str:
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return json.dumps([tokenizer.chat_template, special, sorted(tokenizer.get_vocab().items())], sort_keys=True)


def _write(config: Config, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    path = str(config.model.path)
    try:
        names = AutoConfig.from_pretrained(path, trust_remote_code=False).architectures or []
        scores = any(name.endswith("ForSequenceClassification") for name in names)
        kind = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
        model: Any = kind.from_pretrained(path, dtype="auto", trust_remote_code=False)
    except Exception as error:  # whatever the library says of a folder
        raise ConfigError(f"model.path '{path}' cannot be loaded: {' '.join(str(error).split()):.300}") from error
    known, rows = policy_tokens.size(load_tokenizer(path)), len(model.get_input_embeddings().weight)
    wanted = vocabulary.grown(rows, policy_tokens.size(tokenizer))
    if wanted > rows:
        model.resize_token_embeddings(wanted, mean_resizing=False)
    with torch.no_grad():
        _fill(model, known, rows, policy_tokens.size(tokenizer))
    plain = config.model_copy(update={"generation": type(config.generation)()})  # without stop tokens of the run alone
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    for part in {id(one): one for one in (model.config, model.config.get_text_config())}.values():
        part.eos_token_id, part.pad_token_id = end, pad
    ends = dict.fromkeys([*([] if end is None else [end]), *stop_token_ids(plain, tokenizer)])
    export.write(model, tokenizer, path, folder, model.state_dict())
    file = folder / export.GENERATION_CONFIG
    settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    settings |= {"eos_token_id": list(ends), "pad_token_id": pad}
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _fill(model: Any, known: int, rows: int, tokens: int) -> None:
    """Gives new tokens, and rows that no token has yet behind the old ones, the mean of the rows of known tokens.

    A mean lies among the others, so that a new token is at first about as likely as one can be that the model knows
    nothing of (Hewitt 2021, "Initializing new word embeddings for pretrained language models").
    """
    known = min(known, rows)
    new = [*range(known, min(tokens, rows)), *range(rows, len(model.get_input_embeddings().weight))]
    head: nn.Linear | None = model.get_output_embeddings()
    weights: list[Tensor | None] = [model.get_input_embeddings().weight]
    weights += [] if head is None else [head.weight, head.bias]
    for weight in {id(one): one for one in weights if one is not None}.values():
        weight[new] = weight[:known].double().mean(0).to(weight.dtype)
