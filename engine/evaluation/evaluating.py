"""An evaluation from its models to its files."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.config import Config, ConfigError
from engine.evaluation import entries, exporting, judging, likelihood, results, sampling, settings
from engine.evaluation.judging import Judged
from engine.evaluation.pairwise import PairwiseJudge
from engine.evaluation.places import Place
from engine.machine.world import World, joined
from engine.models import model_folder
from engine.run_folder.summary import versions
from engine.start import preflight


def evaluate(
    given: settings.Evaluate, models: Sequence[Place], run: Config | None, folder: Path, device: str, say: sampling.Say
) -> None:
    """Samples, judges and measures, and writes the results to ``folder``; goes on where an earlier call was killed.

    Args:
        models: their first one is the baseline if no other is named.
        run: settings of the run that all models are of, if they are of one.
        device: ``cpu`` or ``cuda``.

    Raises:
        ConfigError: something does not fit, in one line.
        RewardError: the judge failed.
    """
    if run is not None:
        models = entries.with_base(models, exporting.base(run, say)[0])
    with contextlib.ExitStack() as stack:
        paths = {place.name: stack.enter_context(sampling.as_folder(place, say)) for place in models}
        works = {place.name: sampling.task(given, place, paths[place.name], _first_only(say)) for place in models}
        reference = _reference(given, models, paths, run)
        if reference is not None:
            preflight.check_causal("reference", reference, model_folder.read_config("reference", reference))
        _check_vocabularies(works, given, reference)
        pairwise = PairwiseJudge(given.judge.pairwise, given.data.prompt_column) if given.judge.pairwise else None
        first = works[models[0].name]
        if pairwise is not None:
            pairwise.check_columns({name for prompt in first.prompts for name in prompt.columns})
        compared = entries.baseline(given.baseline.model, models)
        column: Judged | None = None
        if given.baseline.column is not None:
            column = judging.of_column(first.prompts, given.baseline.column, first.tokenizer)
        world = stack.enter_context(joined(device, first.config.launch.timeout_minutes))
        scorer = None if pairwise else judging.scorer(_judged_by(given, first.config), first, world)
        judged = [judging.responses(works[place.name], place, folder / "responses", world, say) for place in models]
        baseline = column or next(one for one in judged if one.place.name == compared)
        if scorer is not None:
            say("Judging")
            for one in [*judged, *([column] if column else [])]:
                scorer.score(one.flat)
        if reference is not None:
            _add_logprobs(judged, reference, paths, first.config, world, say)
    judging.measure(judged, baseline, pairwise)
    about = _about(given, first, baseline.place.name, reference)
    results.write(folder, judged, about)
    say("")
    say(results.as_text(results.table(judged)))
    say(f"\nBaseline {baseline.place.name}; {about['prompts']} prompts; {folder / results.PAGE}")


def _first_only(say: sampling.Say) -> sampling.Say:
    """Says the same note about each model once."""
    seen: set[str] = set()

    def once(text: str) -> None:
        if text not in seen:
            seen.add(text)
            say(text)

    return once


def _reference(
    given: settings.Evaluate, models: Sequence[Place], paths: dict[str, str], run: Config | None
) -> str | None:
    """The folder or hub name of the model that KL is measured against; None for no KL."""
    named = given.reference or (entries.reference_of(run) if run else None)
    if named == entries.BASE and named not in paths and run is not None and given.reference is None:
        return exporting.base(run, lambda _: None)[0] if run.model.path else None
    return paths.get(named, named) if named else None


def _check_vocabularies(works: dict[str, sampling.Task], given: settings.Evaluate, reference: str | None) -> None:
    """Raises ConfigError where tokens of one model would be read by another that has other ones."""
    from engine.data.prompts import load_tokenizer

    first = next(iter(works))
    vocabulary = works[first].tokenizer.get_vocab()
    if given.reward.model is not None or reference is not None:
        for name, work in works.items():
            if work.tokenizer.get_vocab() != vocabulary:
                raise ConfigError(
                    f"{name} has another vocabulary than {first}, so that one reference, or one reward.model, cannot "
                    "read the tokens of both: evaluate them one at a time"
                )
    if reference is not None and load_tokenizer(reference, "reference").get_vocab() != vocabulary:
        raise ConfigError(f"reference '{reference}' has another vocabulary than {first}: KL is between equal tokens")


def _judged_by(given: settings.Evaluate, config: Config) -> Config:
    """Settings for the judge: a reward model's budget holds the longest text."""
    longest = given.rollout.max_prompt_tokens + given.rollout.max_response_tokens
    train = config.train.model_copy(update={"tokens_per_microbatch": max(likelihood.TOKENS, 2 * longest)})
    return config.model_copy(update={"train": train})


def _add_logprobs(
    judged: Sequence[Judged], reference: str, paths: dict[str, str], config: Config, world: World, say: sampling.Say
) -> None:
    """Log-probabilities of all responses, by the model that gave them and by the reference."""
    say("Log-probabilities by the models and the reference")
    together = [sample for one in judged for sample in one.flat]
    whole = iter(likelihood.sums(reference, together, config, world))
    for one in judged:
        one.reference_logprobs = [next(whole) for _ in one.flat]
        same = paths[one.place.name] == reference
        one.logprobs = (
            one.reference_logprobs if same else likelihood.sums(paths[one.place.name], one.flat, config, world)
        )


def _about(given: settings.Evaluate, first: sampling.Task, baseline: str, reference: str | None) -> dict[str, Any]:
    sources = [f"reward.{name} {getattr(given.reward, name)}" for name in given.reward.sources]
    pairwise = f"judge.pairwise {given.judge.pairwise}" if given.judge.pairwise else ""
    return {
        "prompts": len(first.prompts),
        "samples_per_prompt": given.rollout.samples_per_prompt,
        "judge": pairwise or " + ".join(sources) or f"the verifier of {given.data.task}",
        "baseline": baseline,
        "reference": reference,
        "settings": given.model_dump(mode="json"),
        "versions": versions(),
    }
