"""Pairs through a judge, a chunk at a time, into a file; a command that was killed goes on where it was."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import rewards
from engine.config import Config, ConfigError
from engine.data import policy_tokens, training_rows
from engine.data.prompts import Prompt
from engine.data.templates import PromptError, tools_of
from engine.evaluation import figures, likelihood
from engine.evaluation.pairs import Candidates
from engine.evaluation.places import digest
from engine.evaluation.response_files import Unfinished, check_parquet
from engine.evaluation.sampling import Say
from engine.evaluation.settings import Relabel
from engine.machine.world import joined
from engine.sample import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK = 256
"""Prompts that the judge is asked about at a time, between two writes."""


def write(
    given: Relabel,
    config: Config,
    candidates: Sequence[Candidates],
    output: Path,
    device: str,
    say: Say,
    *,
    without: int = 0,
) -> None:
    """Has the judge score what ``output`` does not have yet, gives it its name, and says what came of it.

    The partial file has a line for each prompt, ties and those without a score among them; the output has the pairs.
    Chunks begin at the same prompts in every process, so that the numbers do not depend on where an earlier one was
    killed.

    Args:
        config: its ``model.path`` is the model whose tokenizer is used; None for the embedded task's.
        device: ``cpu`` or ``cuda``.
        without: prompts that are no candidates, for want of two different answers.

    Raises:
        ConfigError: a row that cannot be encoded, a judge that does not fit, other settings that have begun this file,
            columns that its format cannot hold, or no pair that is left.
        RewardError: the judge failed.
    """
    tokenizer = _tokenizer(config)
    samples = _samples(candidates, config, tokenizer)
    judged_by = _judged_by(config, samples)
    sources = rewards.read(judged_by, tokenizer)
    firsts = [each[0] for each in samples]
    sources.check([Prompt(one.prompt_ids, one.prompt_text, one.columns) for one in firsts])
    if output.suffix == ".parquet":
        check_parquet([one.row(0, 1, [0.0] * len(one.answers)) for one in candidates])
    file = Unfinished(output, _made_by(given, config, samples), what="pairs")
    if file.rows < len(candidates):
        file.cut(file.rows // CHUNK * CHUNK)
        if file.rows:
            say(f"Going on after {file.rows} of {len(candidates)} prompts, which are in {file.path}")
        with joined(device, config.launch.timeout_minutes) as world:
            scorer = rewards.load(judged_by, world, sources)
            for first in range(file.rows, len(candidates), CHUNK):
                part = samples[first : first + CHUNK]
                scorer.score([sample for each in part for sample in each])
                judged = zip(candidates[first : first + CHUNK], part, strict=True)
                file.add([_judged(one, each) for one, each in judged])
                say(f"{file.rows} of {len(candidates)} prompts")
    lines, kept = list(file.read()), {"told apart", "tie"} if given.ties == "keep" else {"told apart"}
    for line in _summary(given, lines, without):
        say(line)
    if not any(line["outcome"] in kept for line in lines):
        raise ConfigError(f"no pair is left to write: ask another judge, or give --ties keep (scores: {file.path})")
    file.finish(lambda line: line["pair"] if line["outcome"] in kept else None)


def _tokenizer(config: Config) -> PreTrainedTokenizerBase:
    if config.model.path is not None:
        return policy_tokens.of_model(config.model.path, config.data, "model.path")
    from engine.tasks import addition

    return addition.tokenizer()


def _samples(
    candidates: Sequence[Candidates], config: Config, tokenizer: PreTrainedTokenizerBase
) -> list[list[Sample]]:
    """For each prompt its answers, in the tokens that training on them has."""
    answered = training_rows.answers(config, tokenizer)
    found: list[list[Sample]] = []
    for group, one in enumerate(candidates):
        columns = one.columns | {config.data.prompt_column: one.prompt}
        try:
            tools = tools_of(one.columns, config.data)
            samples = [answered(one.prompt, answer, tools) for answer in one.answers]
        except PromptError as error:
            raise ConfigError(f"{one.place}: {error}") from error
        for place, (answer, sample) in enumerate(zip(one.answers, samples, strict=True)):
            decoded = tokenizer.decode(sample.response_ids, skip_special_tokens=True)
            text = answer if isinstance(answer, str) else str(decoded)
            samples[place] = dataclasses.replace(sample, group_id=group, columns=columns, response_text=text)
        found.append(samples)
    return found


def _judged_by(config: Config, samples: Sequence[Sequence[Sample]]) -> Config:
    """Settings for the judge: its budget holds the longest text, and what a reward model cannot take is left out."""
    longest = max(sample.length for each in samples for sample in each)
    train = config.train.model_copy(update={"tokens_per_microbatch": max(likelihood.TOKENS, 2 * longest)})
    rollout = config.rollout.model_copy(update={"max_prompt_tokens": 1, "max_response_tokens": 1})
    return config.model_copy(update={"train": train, "rollout": rollout})


def _made_by(given: Relabel, config: Config, samples: Sequence[Sequence[Sample]]) -> dict[str, Any]:
    """All that the scores depend on."""
    read = [(one.prompt_ids, one.response_ids, one.response_text, one.columns) for each in samples for one in each]
    asked = hashlib.sha256(repr(read).encode())
    reward = given.reward
    return {
        "data": f"of {len(samples)} prompts ({asked.hexdigest()[:16]})",
        "model.path": config.model.path,
        "model.dtype": given.model.dtype,
        "reward.model": digest(reward.model) if reward.model else None,
        "reward.function": _code(reward.function) if reward.function else None,
        "reward.url": reward.url,
        "reward.weights": reward.weights,
        "launch.device": given.launch.device,
    }


def _code(spec: str) -> str:
    """A function's name, and the digest of its file where it is named by one."""
    file = Path(os.path.expanduser(spec.rpartition(":")[0]))
    if not file.is_file():
        return spec
    return f"{spec} ({hashlib.sha256(file.read_bytes()).hexdigest()[:16]})"


def _judged(one: Candidates, samples: Sequence[Sample]) -> dict[str, Any]:
    """A line of the partial file: whether the judge tells the answers apart, and the pair of the best and the worst."""
    scores = [None if sample.reward is None else sample.reward_parts["score"] for sample in samples]
    places = [place for place, score in enumerate(scores) if score is not None]
    if len(places) < 2:
        return {"outcome": "no score"}
    known = [score or 0.0 for score in scores]
    best, worst = (find(places, key=known.__getitem__) for find in (max, min))
    if known[best] == known[worst]:
        return {"outcome": "tie", "pair": one.row(places[0], places[1], known)}
    return {"outcome": "told apart", "pair": one.row(best, worst, known)}


def _summary(given: Relabel, lines: Sequence[dict[str, Any]], without: int) -> list[str]:
    """What came of the prompts, in words; standard errors are over them, and nan where there is one."""
    count = Counter(line["outcome"] for line in lines)
    apart = [line["pair"] for line in lines if line["outcome"] == "told apart"]
    said = [f"{len(lines)} prompts, of which the judge tells the answers of {len(apart)} apart"]
    if swapped := figures.over_prompts([float(pair["swapped"]) for pair in apart if "swapped" in pair]):
        share, error = 100 * swapped.value, 100 * swapped.stderr
        said.append(f"swapped: {share:.1f} ± {error:.1f} %; agreement with the given order: {100 - share:.1f} %")
    if margin := figures.over_prompts([pair["score_margin"] for pair in apart]):
        said.append(f"margin: {margin.value:.4g} ± {margin.stderr:.2g}")
    ties = "kept in the given order" if given.ties == "keep" else "dropped"
    said.append(f"ties: {count['tie']} {ties}; without a score: {count['no score']} dropped")
    if without:
        said.append(f"without two different answers: {without} dropped")
    return said
