"""Judged models: their responses read, sampled where they are missing, scored, compared with a baseline's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import rewards
from engine.config import Config, ConfigError
from engine.data.prompts import Prompt
from engine.evaluation import figures, response_files, sampling
from engine.evaluation.figures import Figure
from engine.evaluation.pairwise import PairwiseJudge
from engine.evaluation.places import Place
from engine.machine.world import World
from engine.report import records
from engine.sample import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COLUMN = "column "
"""Begins the name of a baseline that is a column of the data."""


@dataclass
class Judged:
    """A model of an evaluation."""

    place: Place
    samples: list[list[Sample]]
    """For each prompt its responses."""
    logprobs: list[float] = field(default_factory=list)
    """Of each response by the model itself, in nats; empty where they are not needed."""
    reference_logprobs: list[float] = field(default_factory=list)
    """The same by the reference."""
    figures: dict[str, Figure] = field(default_factory=dict)

    @property
    def flat(self) -> list[Sample]:
        """All responses."""
        return [sample for prompt in self.samples for sample in prompt]

    @property
    def scores(self) -> list[list[float | None]]:
        """What the judge gave, neither clipped nor penalised; None where it dropped the response."""
        return [[None if one.reward is None else one.reward_parts["score"] for one in each] for each in self.samples]


def responses(work: sampling.Task, place: Place, folder: Path, world: World, say: sampling.Say) -> Judged:
    """A model's responses out of the folder of an evaluation, sampled where they are not there yet.

    Raises:
        ConfigError: those that are there were made with other settings.
    """
    file, about = folder / f"{place.name}.jsonl", folder / f"{place.name}.json"
    if file.exists():
        before = json.loads(about.read_text(encoding="utf-8")) if about.exists() else {}
        if other := [key for key in work.made_by | before if work.made_by.get(key) != before.get(key)]:
            raise ConfigError(
                f"{file} holds responses made with {other[0]} {before.get(other[0])}, and now it is "
                f"{work.made_by.get(other[0])}: remove it, or give another --output"
            )
        say(f"{place.name}: the responses in {file}")
    else:
        say(f"{place.name}: sampling")
        records.write_atomically(about, records.json_text(work.made_by))
        sampling.write(work, file, world, say)
    each = work.config.rollout.samples_per_prompt
    samples = [_sample(row, work.prompts[row["row"]], each) for row in response_files.read(file)]
    return Judged(place, [samples[i : i + each] for i in range(0, len(samples), each)])


def _sample(row: dict[str, Any], prompt: Prompt, each: int) -> Sample:
    return Sample(
        index=row["row"] * each + row["sample"],
        group_id=row["row"],
        prompt_ids=row["prompt_ids"],
        columns=prompt.columns,
        response_ids=row["response_ids"],
        finish_reason=row["finish_reason"],
        prompt_text=row["prompt"],
        response_text=row["response"],
    )


def of_column(prompts: Sequence[Prompt], column: str, tokenizer: PreTrainedTokenizerBase) -> Judged:
    """A column's texts as responses; a list of messages stands for its last one.

    Raises:
        ConfigError: there is no such column, or a row of it is no text.
    """
    samples = []
    for i, prompt in enumerate(prompts):
        if column not in prompt.columns:
            names = ", ".join(prompt.columns)
            raise ConfigError(f"baseline.column: the data has no column '{column}', but {names}")
        text = prompt.columns[column]
        if isinstance(text, list) and text and isinstance(text[-1], dict):
            text = text[-1].get("content")
        if not isinstance(text, str):
            raise ConfigError(f"baseline.column: '{column}' of prompt {i} (counted from 0) is no text: {text!r:.80}")
        ids = tokenizer.encode(text, add_special_tokens=False)
        if tokenizer.eos_token_id not in (None, *ids[-1:]):  # some data name it at the end of their texts
            ids.append(int(tokenizer.eos_token_id))
        one = Sample(i, i, prompt.ids, prompt.columns, ids, "stop", prompt_text=prompt.text, response_text=text)
        samples.append([one])
    return Judged(Place("", f"{COLUMN}{column}", None), samples)


def scorer(config: Config, work: sampling.Task, world: World) -> rewards.Scorer:
    """The judge that scores each response by itself: the sources of ``reward``. Raises ConfigError as a run would."""
    sources = rewards.read(config, work.tokenizer)
    sources.check(work.prompts)
    return rewards.load(config, world, sources)


def measure(models: Sequence[Judged], baseline: Judged, judge: PairwiseJudge | None) -> None:
    """Computes every figure of every model.

    Args:
        judge: of pairs; without one the models have scores.
    """
    accuracy = judge is None and _right_or_wrong(models)
    for one in models:
        found: dict[str, Figure | None] = {}
        if judge is not None:
            found |= figures.compared(_pairs(one, baseline, judge))
        else:
            pairs = figures.differences(one.scores, baseline.scores)
            found |= figures.compared(pairs)
            found["normalised"] = figures.mean(pairs)
            found["score"] = figures.mean(one.scores)
            if accuracy:
                found["accuracy"] = found.pop("score")
                found |= {f"pass@{k}": figures.pass_at(one.scores, k) for k in _powers(len(one.samples[0]))}
            dropped = [[float(score is None) for score in prompt] for prompt in one.scores]
            if any(map(any, dropped)):
                found["dropped"] = figures.mean(dropped)
        found["tokens"] = figures.mean([[float(len(sample.response_ids)) for sample in each] for each in one.samples])
        found["stopped"] = figures.mean([[float(s.finish_reason == "stop") for s in each] for each in one.samples])
        found |= _distance(one)
        one.figures = {name: figure for name, figure in found.items() if figure is not None}


def _right_or_wrong(models: Sequence[Judged]) -> bool:
    """True where every score of every model is 0 or 1, as a verifier gives them."""
    return all(score in (None, 0.0, 1.0) for one in models for prompt in one.scores for score in prompt)


def _powers(most: int) -> list[int]:
    """2, 4, 8, ... below ``most``, and ``most`` itself; nothing for one response a prompt."""
    return sorted({2**i for i in range(1, most.bit_length()) if 2**i < most} | ({most} if most > 1 else set()))


def _pairs(one: Judged, baseline: Judged, judge: PairwiseJudge) -> list[list[float]]:
    """What a judge of pairs says of each response and one of the baseline's, taken in turn."""
    theirs = [
        each[k % len(each)] for each, ours in zip(baseline.samples, one.samples, strict=True) for k in range(len(ours))
    ]
    answers = iter(judge(one.flat, theirs))
    return [[said for _ in each if (said := next(answers)) is not None] for each in one.samples]


def _distance(one: Judged) -> dict[str, Figure | None]:
    """Of responses with log-probabilities: the sampled KL to the reference, in nats a response, and its perplexity."""
    if not one.reference_logprobs:
        return {}
    own, reference = iter(one.logprobs), iter(one.reference_logprobs)
    kl = figures.mean([[next(own) - next(reference) for _ in each] for each in one.samples])
    rest = iter(one.reference_logprobs)
    sums = [sum(next(rest) for _ in each) for each in one.samples]
    tokens = [sum(len(sample.response_ids) for sample in each) for each in one.samples]
    return {"kl": kl, "perplexity": figures.perplexity(sums, tokens)}
