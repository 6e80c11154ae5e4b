"""Scores by a reward model: a frozen sequence classifier with one label, read at each sequence's last token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine import data
from engine.config import Config, ConfigError
from engine.distributed import World
from engine.rewards.answers import RewardError, Scores, checked
from engine.sample import Sample
from engine.training import models, zero
from engine.training.packing import microbatches

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ModelReward:
    """A reward model, sharded with ZeRO-3 when training is. Building and calling it are collective.

    With the policy's vocabulary it reads the very token ids of prompt and response. With another one the texts are
    rendered and tokenized anew: by the chat template of its own tokenizer where the prompt is chat messages; else
    prompt and response end to end, closed by its own end-of-sequence token where the response ended with the policy's.
    """

    def __init__(self, config: Config, world: World) -> None:
        path = config.reward.model
        assert path is not None
        self._config, self._world, self._name = config, world, f"reward.model '{path}'"
        policy, own = _policy_tokenizer(config), data.load_tokenizer(path, "reward.model")
        self._policy_eos = policy.eos_token_id
        self._own = None if own.get_vocab() == policy.get_vocab() else own
        network = _load(path, self._name, getattr(torch, config.model.dtype))
        shape = network.model.config.get_text_config()
        self._vocabulary, self._positions = shape.vocab_size, getattr(shape, "max_position_embeddings", None)
        longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
        if self._own is None and self._positions is not None and longest > self._positions:
            raise ConfigError(
                f"{self._name} takes {self._positions} tokens at most, fewer than rollout.max_prompt_tokens + "
                f"rollout.max_response_tokens = {longest}"
            )
        if self._own is not None and config.data.chat_template and self._own.chat_template is None:
            raise ConfigError(f"{self._name}: its tokenizer has no chat template, which data.chat_template asks for")
        self._engine = zero.prepare_deepspeed(network, config)

    @torch.no_grad()
    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Raises ``RewardError`` for a sequence that the model cannot take, or a score that is not finite."""
        sequences = [
            Sample(index=i, group_id=i, prompt_ids=self._ids(sample), response_ids=[])
            for i, sample in enumerate(samples)
        ]
        scores = torch.full((len(samples),), torch.nan)
        singles = torch.arange(len(samples))[:, None]
        for batch in microbatches(sequences, singles, self._config.train.tokens_per_microbatch, self._world):
            _, last = self._engine(batch)
            if batch.counts:
                scores[torch.tensor(batch.indices)] = last.cpu()
        return checked(scores.tolist(), samples, self._name)

    def _ids(self, sample: Sample) -> list[int]:
        ids = sample.prompt_ids + sample.response_ids if self._own is None else self._rendered(sample, self._own)
        budget = self._config.train.tokens_per_microbatch
        for limit, what in ((self._positions, "the model takes"), (budget, "train.tokens_per_microbatch allows")):
            if limit is not None and len(ids) > limit:
                raise RewardError(
                    f"{self._name}: prompt and response are {len(ids)} of its tokens and {what} {limit}; the prompt is "
                    f"{sample.prompt_text!r:.200}"
                )
        if not ids or max(ids) >= self._vocabulary:
            fault = f"a token id beyond its {self._vocabulary} tokens" if ids else "no token"
            raise RewardError(f"{self._name}: the prompt {sample.prompt_text!r:.200} with its response gives {fault}")
        return ids

    def _rendered(self, sample: Sample, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        prompt = sample.columns.get(self._config.data.prompt_column)
        if isinstance(prompt, str) and self._config.data.chat_template:
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            if tokenizer.chat_template is None:
                raise RewardError(f"{self._name}: prompts are chat messages, and its tokenizer has no chat template")
            messages = [*prompt, {"role": "assistant", "content": sample.response_text}]
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])
        ids = list(tokenizer(sample.prompt_text + sample.response_text)["input_ids"])
        ended = sample.finish_reason == "stop" and sample.response_ids[-1] == self._policy_eos
        if ended and tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
            ids.append(tokenizer.eos_token_id)
        return ids


def _policy_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    if config.model.path is not None:
        return data.load_tokenizer(config.model.path)
    from engine.tasks import addition

    return addition.tokenizer()


def _load(path: str, name: str, dtype: torch.dtype) -> models.Value:
    from transformers import AutoConfig

    try:
        shape = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} cannot be loaded: {str(error).splitlines()[0]}") from error
    classifies = any(one.endswith("ForSequenceClassification") for one in shape.architectures or ())
    if classifies and shape.num_labels != 1:
        raise ConfigError(f"{name} is a classifier with {shape.num_labels} labels; a reward model has one")
    network, new_head = models.load_value(path, dtype=dtype)
    if not hasattr(network.model, "score"):
        raise ConfigError(
            f"{name} ({type(network.model).__name__}) is no decoder with a head called 'score', the only kind of "
            "reward model that can be loaded here: serve it and give reward.url"
        )
    if new_head:
        raise ConfigError(f"{name} has no scoring head: it lacks the weights 'score.weight' of a sequence classifier")
    return network
