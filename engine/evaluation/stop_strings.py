"""Texts that end a response: what comes after one is cut off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.sample import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def cut(sample: Sample, strings: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
    """Ends a response at the first of ``strings`` in it: its text before that, its tokens with the one completing it.

    Nothing changes where the text holds none. A token may hold the end of a string and more: it is kept whole, so that
    token ids and log-probabilities remain those that were sampled.
    """

    def found(tokens: int) -> int:
        """Where the first string begins in the text of so many tokens; -1 if it holds none."""
        text = str(tokenizer.decode(sample.response_ids[:tokens], skip_special_tokens=True))
        return min((place for one in strings if (place := text.find(one)) >= 0), default=-1)

    least, most = 1, len(sample.response_ids)
    if found(most) < 0:
        return
    while least < most:  # the texts of more tokens hold what those of fewer do
        middle = (least + most) // 2
        least, most = (least, middle) if found(middle) >= 0 else (middle + 1, most)
    text = str(tokenizer.decode(sample.response_ids[:most], skip_special_tokens=True))
    sample.response_text = text[: found(most)]
    sample.response_ids = sample.response_ids[:most]
    sample.behaviour_logprobs = sample.behaviour_logprobs[:most]
    sample.finish_reason = "stop"
