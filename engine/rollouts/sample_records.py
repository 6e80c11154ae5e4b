"""What a run writes of its samples to samples.jsonl: those of a step, and the responses to held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine.config import Config
from engine.machine.world import World
from engine.sample import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Record = dict[str, Any]


def of_step(
    kept: Sequence[Sample],
    drawn: Sequence[Sample],
    tokenizer: PreTrainedTokenizerBase,
    config: Config,
    world: World,
) -> list[Record]:
    """Records of a step, for rank 0 to write: some of its own share, or all of every rank's. Collective.

    Of samples that nothing was learned from ``dropped`` is true.

    Args:
        kept: this rank's samples that are trained on.
        drawn: all of this rank's samples.
    """
    shown = drawn if config.save.samples_per_step == "all" else kept or drawn
    trained = {id(one) for one in kept}
    dropped = [{} if id(one) in trained else {"dropped": True} for one in shown]
    return _of_ranks([_record(one, tokenizer) | more for one, more in zip(shown, dropped, strict=True)], config, world)


def of_evaluation(
    samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase, config: Config, world: World
) -> list[Record]:
    """Records of responses to held-out prompts likewise: the first ones, or all. Collective; ``held_out`` is true."""
    return _of_ranks([_record(one, tokenizer) | {"held_out": True} for one in samples], config, world)


def _of_ranks(records: list[Record], config: Config, world: World) -> list[Record]:
    wanted = config.save.samples_per_step
    if wanted == "all":
        return [record for rank in world.gather(records) for record in rank]
    return records[:wanted]


def _record(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Record:
    """A sample's record, and its special tokens.

    These mostly stand behind a response, and only what does is then written a second time: ``ending``. Where they are
    elsewhere, ``response_raw`` is the whole text with them.
    """
    raw = str(tokenizer.decode(sample.response_ids, skip_special_tokens=False))
    begins = raw.startswith(sample.response_text)
    special = {"ending": raw[len(sample.response_text) :]} if begins else {"response_raw": raw}
    return sample.record | (special if raw != sample.response_text else {})
