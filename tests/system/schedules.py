"""All algorithms, with batches at most 0 and 1 updates old, through each sampler: one process trains, one generates.

Started by test_schedules on two ranks. Usage: schedules.py MODEL FOLDER BACKEND [BACKEND ...]
"""

import sys
from functools import cache

from transformers import AutoModelForCausalLM

from engine import loop
from engine.config import Config, cli
from engine.generation.base import Generator
from engine.machine.world import World, joined
from engine.report import figures
from engine.rollouts.source import Source
from engine.schedules import split
from engine.start import build, checks, preflight
from tests.system.helpers import ROOT

ALGORITHMS = ("ppo", "rloo", "grpo", "online_dpo", "bok")


def config(model: str, folder: str, backend: str, algo: str, staleness: int) -> Config:
    options = {
        "algo": algo,
        "name": f"{backend}-{algo}-{staleness}",
        "output_dir": folder,
        "model.path": model,
        "reward.function": f"{folder}/even.py:even",
        "generation.backend": backend,
        "generation.max_logprob_gap": 0.001,
        "rollout.prompts_per_step": 8,
        "rollout.samples_per_prompt": 4,
        "train.steps": 3,
        "train.learning_rate": 1e-3,
        "ppo.value_warmup_steps": 0,
        "eval.prompts": 15,  # not a multiple of the ranks
        "eval.samples_per_prompt": 2,
        "eval.temperature": 1.0,
        "memory.kv_cache_gib": 0.25,
        "schedule.placement": "split",
        "schedule.staleness": staleness,
        "launch.ranks": 2,
    }
    if algo == "grpo":  # whose only optimizer step gives the old log-probabilities itself
        options["train.minibatches_per_batch"] = 1
    arguments = [text for key, value in options.items() for text in (f"--{key}", str(value))]
    found, _ = cli.parse(["--config", str(ROOT / "configs" / "quickstart.yaml"), *arguments])
    checks.check(found, 2, "cpu")
    return found


@cache
def inputs(model: str, folder: str, backend: str) -> preflight.Inputs:
    return preflight.read(config(model, folder, backend, "rloo", 0))


@cache
def engine(backend: str, world: World, model: str, folder: str) -> Generator:
    """One sampler for all runs with this backend: an engine takes longer to start than they take."""
    return build.sampler(inputs(model, folder, backend), config(model, folder, backend, "rloo", 0), world, model)[0]


def sampler(config: Config, world: World, model: str) -> tuple[Generator, Source]:
    generator = engine(config.generation.backend, world, model, config.output_dir)
    start = AutoModelForCausalLM.from_pretrained(model).named_parameters()
    generator.renew(((name, parameter.detach()) for name, parameter in start), 0)
    generator.close = lambda: None  # type: ignore[method-assign]
    read = inputs(model, config.output_dir, config.generation.backend)
    return generator, Source(config, read.tokenizer, read.prompts, read.held_out, rank=world.rank, size=world.size)


def main(model: str, folder: str, *backends: str) -> None:
    figures.write_figures = lambda *_: None  # a second a run; test_runs has them drawn
    with joined("cpu", 5, generators=1) as world:
        for backend in backends:
            for algo in ALGORITHMS:
                for staleness in (0, 1):
                    one = config(model, folder, backend, algo, staleness)
                    if world.generates:
                        split.generate(one, world, sampler)
                    else:
                        loop.train(one, inputs(model, folder, backend), None, world)


if __name__ == "__main__":
    main(*sys.argv[1:])
