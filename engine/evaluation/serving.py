"""A reward model behind ``engine.serve_reward``: a request's texts to the tokens that it was trained on, and scores."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from engine import rewards
from engine.config import Config
from engine.data import policy_tokens, training_rows
from engine.data.templates import PromptError, tools_of
from engine.evaluation.reward_server import Asked, BadRequest, RewardServer, Unscorable, same_length, texts
from engine.machine.world import joined
from engine.sample import Sample


def serve(config: Config, device: str, server: RewardServer, say: Callable[[str], None]) -> None:
    """Loads ``reward.model`` and scores for the server until a signal interrupts.

    Args:
        config: its ``model.path`` is the reward model too: its tokenizer and ends of a response are used.
        device: ``cpu`` or ``cuda``.

    Raises:
        ConfigError: it is no reward model that can be loaded.
        KeyboardInterrupt: SIGTERM or Ctrl-C.
    """
    assert config.model.path is not None
    tokenizer = policy_tokens.of_model(config.model.path, config.data)
    rollout = config.rollout.model_copy(update={"max_prompt_tokens": 1, "max_response_tokens": 1})
    sources = rewards.read(config.model_copy(update={"rollout": rollout}), tokenizer)
    with joined(device, config.launch.timeout_minutes) as world:
        scorer = rewards.load(config, world, sources)
        server.start(Reader(config, training_rows.answers(config, tokenizer)).samples)
        say(f"Serving {config.model.path} at {server.url} (GET /health); stop it with Ctrl-C or SIGTERM")
        for batch in server.batches(config.train.tokens_per_microbatch):
            answer(batch, scorer.score)


def answer(batch: Sequence[Asked], score: Callable[[Sequence[Sample]], None]) -> None:
    """Scores the requests of a batch together; where that fails, each by itself, so that one fails alone."""
    try:
        score([sample for asked in batch for sample in asked.samples])
    except rewards.RewardError as error:
        if len(batch) > 1:
            for asked in batch:
                answer([asked], score)
        else:
            batch[0].scores.set_exception(Unscorable(str(error)))
        return
    for asked in batch:
        asked.scores.set_result([sample.reward_parts.get("model") for sample in asked.samples])


class Reader:
    """What a request is made of.

    A prompt is the row's own where that is chat messages (or a string, with ``data.chat_template``), by the reward
    model's template, with the tools of ``data.tools_column``. Any other is the text that the policy saw, in which names
    of control tokens are control tokens. Its completion and the token that ends a response follow.
    """

    def __init__(self, config: Config, answered: Callable[..., Sample]) -> None:
        self._data, self._answered = config.data, answered
        self._lock = threading.Lock()  # a tokenizer is for one thread at a time

    def samples(self, content: dict[str, Any]) -> list[Sample]:
        """Sequences to score; raises ``BadRequest``, which names the place of what cannot be used."""
        prompts, completions = texts(content, "prompts"), texts(content, "completions")
        lists = {"prompts": prompts, "completions": completions, "raw_prompts": content.get("raw_prompts", prompts)}
        if self._data.tools_column in content:
            lists[self._data.tools_column] = content[self._data.tools_column]
        for name, values in lists.items():
            if not isinstance(values, list):
                raise BadRequest(f"'{name}' must be a list, not {values!r:.80}")
        same_length(lists)
        raw, found = lists["raw_prompts"], []
        for place, (text, completion, own) in enumerate(zip(prompts, completions, raw, strict=True)):
            messages = isinstance(own, list) and bool(own) and isinstance(own[0], dict)
            as_row = messages or (self._data.chat_template and isinstance(own, str))
            row = {name: values[place] for name, values in lists.items()}
            try:
                with self._lock:
                    if as_row:
                        found.append(self._answered(own, completion, tools_of(row, self._data)))
                    else:
                        found.append(self._answered(text, completion))
            except PromptError as error:
                raise BadRequest(f"item {place}: {error}") from error
        return found
