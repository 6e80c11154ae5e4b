"""Responses of one model to prompts, a chunk at a time, into a file; a command that was killed goes on where it was."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import Config, ConfigError
from engine.data import policy_tokens
from engine.data.end_of_sequence import stop_token_ids
from engine.data.prompts import Prompt, load_set
from engine.evaluation import exporting, samplers, settings, stop_strings
from engine.evaluation.places import Place, digest
from engine.evaluation.response_files import OWN, Unfinished, check_parquet
from engine.generation.base import Generator
from engine.generation.sampling import Sampling
from engine.machine.world import World
from engine.models import model_folder
from engine.rollouts.source import sample_responses
from engine.sample import Sample
from engine.start import preflight

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VLLM_BATCHES = 4
"""Times ``generation.max_batch`` in a chunk of vLLM's, which starts the next response wherever one has ended."""

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Task:
    """What is sampled: prompts in one model's tokens, and how."""

    config: Config
    """Its ``model.path`` is the model's folder."""
    sampling: Sampling
    stop_strings: Sequence[str]
    tokenizer: PreTrainedTokenizerBase
    prompts: list[Prompt]
    made_by: dict[str, Any]
    """All that the responses depend on."""

    @property
    def longest_prompt(self) -> int:
        """In tokens."""
        return max(len(prompt.ids) for prompt in self.prompts)


@contextlib.contextmanager
def as_folder(place: Place, say: Say) -> Iterator[str]:
    """The folder or hub name of a model; a checkpoint is written to a folder that is removed on the way out."""
    if not place.checkpoint:
        yield place.path
        return
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        say(f"Writing {place.path} as a model folder")
        exporting.write(place, Path(folder) / place.name, say=say)
        yield str(Path(folder) / place.name)


def task(given: settings.Generate | settings.Evaluate, place: Place, folder: str, say: Say) -> Task:
    """Reads and checks what is needed to sample from a model, before its weights load.

    Args:
        folder: of the model that ``place`` is.

    Raises:
        ConfigError: the first fault, in one line.
    """
    config = settings.as_config(given, folder)
    shape = model_folder.read_config("model", folder)
    preflight.check_causal("model", folder, shape)
    tokenizer = policy_tokens.of_model(folder, config.data)
    prompts, notes = load_set(config, tokenizer, given.held_out, given.limit)
    for note in notes:
        say(note)
    names = {name for prompt in prompts for name in prompt.columns} - {config.data.prompt_column}
    if clash := sorted(names & set(OWN)):
        raise ConfigError(
            f"the data's column '{clash[0]}' has the name of one that a file of responses has: rename the column"
        )
    sampler = given.generation
    found = Task(
        config,
        Sampling(
            config.rollout.max_response_tokens,
            sampler.temperature,
            stop_token_ids(config, tokenizer),
            top_p=sampler.top_p,
            top_k=sampler.top_k,
        ),
        sampler.stop_strings,
        tokenizer,
        prompts,
        {},
    )
    preflight.check_positions(config, "model", folder, shape, found.longest_prompt)
    asked = hashlib.sha256(repr([(prompt.ids, prompt.columns) for prompt in prompts]).encode()).hexdigest()
    made_by = {
        "model": place.path if place.checkpoint else digest(folder),
        "prompts": f"{len(prompts)} ({asked[:16]})",
        "seed": given.seed,
        "model.dtype": given.model.dtype,
        "rollout.samples_per_prompt": given.rollout.samples_per_prompt,
        "rollout.max_response_tokens": given.rollout.max_response_tokens,
        "launch.device": given.launch.device,
    }
    made_by |= {f"generation.{key}": value for key, value in sampler.model_dump(mode="json").items()}
    return dataclasses.replace(found, made_by=made_by)


def write(work: Task, output: Path, world: World, say: Say) -> None:
    """Samples what ``output`` does not have yet and gives it its name.

    A chunk of prompts is sampled and written at once, and chunks begin at the same prompts in every process, so that
    the numbers do not depend on where an earlier one was killed.

    Raises:
        ConfigError: other settings have begun this file, or its format cannot hold the data's columns.
        disk.WriteFailed: it cannot be written.
    """
    if output.suffix == ".parquet":
        check_parquet([_columns(prompt, work.config) for prompt in work.prompts])
    each, generation = work.config.rollout.samples_per_prompt, work.config.generation
    batches = VLLM_BATCHES if generation.backend == "vllm" else 1
    chunk = max(1, batches * generation.max_batch // each)
    file, total = Unfinished(output, work.made_by), len(work.prompts) * each
    if file.rows < total:
        whole = file.rows // (chunk * each) * chunk
        file.cut(whole * each)
        if whole:
            say(f"Going on after {file.rows} of {total} responses, which are in {file.path}")
        with samplers.opened(work.config, work.longest_prompt, world) as generator:
            started, tokens = time.perf_counter(), 0
            for first in range(whole, len(work.prompts), chunk):
                samples = _sample(work, generator, first, work.prompts[first : first + chunk])
                file.add([_row(one, work.config) for one in samples])
                tokens += sum(len(one.response_ids) for one in samples)
                rate = tokens / (time.perf_counter() - started)
                say(f"{file.rows} of {total} responses, {rate:.0f} tokens/s")
    file.finish()


def _sample(work: Task, generator: Generator, first: int, prompts: Sequence[Prompt]) -> list[Sample]:
    samples = sample_responses(
        prompts,
        generator,
        work.tokenizer,
        work.sampling,
        samples_per_prompt=work.config.rollout.samples_per_prompt,
        first_group=first,
        seed=work.config.seed,
        step=0,
    )
    if work.stop_strings:
        for one in samples:
            stop_strings.cut(one, work.stop_strings, work.tokenizer)
    return samples


def _columns(prompt: Prompt | Sample, config: Config) -> dict[str, Any]:
    """A row's own columns, its prompt under the name that reward functions know it by."""
    column = config.data.prompt_column
    return {("raw_prompt" if name == column else name): value for name, value in prompt.columns.items()}


def _row(sample: Sample, config: Config) -> dict[str, Any]:
    return {
        "row": sample.group_id,
        "sample": sample.index % config.rollout.samples_per_prompt,
        "prompt": sample.prompt_text,
        "response": sample.response_text,
        "finish_reason": sample.finish_reason,
        "prompt_ids": sample.prompt_ids,
        "response_ids": sample.response_ids,
        "logprobs": sample.behaviour_logprobs.tolist(),
        **_columns(sample, config),
    }
