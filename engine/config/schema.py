"""The configuration tree: typed, documented, checked before anything heavy is imported.

Every leaf has a type, a default and a description with its unit; ``engine.config.cli`` turns them into command-line
options and ``--help``. Sections lie in ``inputs``, ``learning`` and ``running`` beside this module, and an algorithm's
own in its file. None of these imports torch, so that a bad configuration fails in well under a second.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from pydantic import Field, create_model, field_validator, model_validator

from algorithms.base import Algorithm, Section, ValueModelSettings
from algorithms.registry import BUILT_IN
from engine.config.inputs import Data, Lora, Model, Reward, with_home
from engine.config.learning import KL, Generation, OffPolicy, Rollout, Train
from engine.config.running import Eval, Launch, Memory, Push, Report, Save, Schedule


class _Config(Section):
    """One run of Tandem."""

    algorithms: ClassVar[Mapping[str, Algorithm]] = BUILT_IN
    """Those that ``algo`` may name."""

    algo: str = Field(
        "ppo", description=f"Algorithm: {', '.join(BUILT_IN)}, or your own: FILE.py:CLASS or PACKAGE.MODULE:CLASS"
    )
    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        0, description="Fixes prompts' order, sampling, minibatches and new weights"
    )
    output_dir: str = Field("runs", description="Folder that holds one folder a run")
    name: Annotated[str, Field(pattern=r"^[\w][\w.=+-]{0,99}$")] | None = Field(
        None, description="The run's folder in output_dir. Default: algorithm, data and time of day"
    )
    resume: str | None = Field(
        None, description="Run folder to go on with; its configuration is the default for everything else"
    )
    live: bool | None = Field(None, description="Live display or plain lines. Default: live on a terminal")
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables to set before anything loads")
    model: Model = Field(default_factory=Model)
    lora: Lora = Field(default_factory=Lora)
    data: Data = Field(default_factory=Data)
    reward: Reward = Field(default_factory=Reward)
    rollout: Rollout = Field(default_factory=Rollout)
    generation: Generation = Field(default_factory=Generation)
    memory: Memory = Field(default_factory=Memory)
    train: Train = Field(default_factory=Train)
    kl: KL = Field(default_factory=KL)
    off_policy: OffPolicy = Field(default_factory=OffPolicy)
    schedule: Schedule = Field(default_factory=Schedule)
    launch: Launch = Field(default_factory=Launch)
    eval: Eval = Field(default_factory=Eval)
    save: Save = Field(default_factory=Save)
    report: Report = Field(default_factory=Report)
    push: Push = Field(default_factory=Push)

    @model_validator(mode="before")
    @classmethod
    def _stringify_env(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and isinstance(raw.get("env"), dict):
            raw = {**raw, "env": {str(k): str(v) for k, v in raw["env"].items()}}
        return raw

    @field_validator("output_dir", "resume")
    @classmethod
    def _at_home(cls, path: str | None) -> str | None:
        return with_home(path)

    @field_validator("algo")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name not in cls.algorithms:
            near = difflib.get_close_matches(name, cls.algorithms, n=1)
            meant = f"; did you mean '{near[0]}'?" if near else ""
            names = ", ".join(f"'{one}'" for one in cls.algorithms)
            raise ValueError(f"is none of {names}, and your own is named by FILE.py:CLASS{meant}")
        return name

    @property
    def algorithm(self) -> Algorithm:
        """What the chosen algorithm needs, and its objective."""
        return self.algorithms[self.algo]

    @property
    def algorithm_settings(self) -> Section | None:
        """The chosen algorithm's own settings; None if it has none."""
        return getattr(self, self.algorithm.section) if self.algorithm.Settings else None

    @property
    def value_settings(self) -> ValueModelSettings | None:
        """How the value model is trained; None without one."""
        return cast(ValueModelSettings, self.algorithm_settings) if self.algorithm.value_model else None

    @property
    def value_warmup_steps(self) -> int:
        """First steps in which only the value model is trained."""
        return self.value_settings.value_warmup_steps if self.value_settings else 0

    @property
    def generating_ranks(self) -> int:
        """Ranks that only generate."""
        return self.schedule.generators if self.schedule.placement == "split" else 0

    @property
    def has_reference(self) -> bool:
        """True where the run holds a frozen reference policy: for a KL penalty, or because the algorithm needs it."""
        return self.algorithm.reference or (self.algorithm.kl is not None and self.kl.coef > 0)

    @property
    def loads_reference(self) -> bool:
        """True where the reference is a model of its own; with LoRA it can be the policy without its adapters."""
        return self.has_reference and not (self.lora.rank and self.model.reference_path is None)

    @property
    def trains_on_rows(self) -> bool:
        """True where batches are rows of a data set: nothing is sampled or scored."""
        return self.algorithm.batches == "rows"

    @property
    def trained(self) -> Literal["policy", "reward_model"]:
        """The model that the run makes, after which its metrics and the files of its checkpoints are named."""
        return "reward_model" if self.algorithm.head == "score" else "policy"

    @property
    def measure(self) -> Literal["accuracy", "reward", "loss"]:
        """What the run is judged by on held-out prompts or rows, and the best model chosen."""
        if self.trains_on_rows:
            return "accuracy" if self.trained == "reward_model" else "loss"
        return "accuracy" if self.has_verifier else "reward"

    @property
    def eval_metric(self) -> str:
        """``measure`` as the metric of an evaluation."""
        return f"eval/{self.measure}"

    def is_better(self, measured: float, best: float | None) -> bool:
        """True where an evaluation's ``eval_metric`` is better than the best one before, if there is any."""
        return best is None or (measured < best if self.measure == "loss" else measured > best)

    @property
    def has_verifier(self) -> bool:
        """True where scores are 0 or 1, right or wrong: the embedded task's own."""
        return not self.reward.sources and not self.trains_on_rows

    @property
    def scoring_seconds(self) -> float:
        """How long a function or a server may take for a rank's part of a rollout batch.

        By default a little less than ranks wait for each other, so that the one that is stuck says so before the others
        give up on it.
        """
        given = self.reward.batch_timeout_minutes
        return 60 * (0.9 * self.launch.timeout_minutes if given is None else given)

    @property
    def episodes_per_step(self) -> int:
        """Sequences in a batch, over all ranks: responses, or those that rows hold."""
        if self.trains_on_rows:
            return self.train.rows_per_step * self.sequences_side_by_side
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt

    @property
    def sequences_side_by_side(self) -> int:
        """Sequences that a forward pass may not separate: 2 where the loss is of pairs."""
        return 2 if self.algorithm.rows == "pair" else 1

    @property
    def longest_sequence(self) -> int:
        """Tokens of prompt and response together, at most."""
        if self.trains_on_rows:
            return self.data.max_row_tokens
        return self.rollout.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.train.steps * self.train.epochs_per_batch * self.train.minibatches_per_batch

    @property
    def policy_optimizer_steps(self) -> int:
        """Optimizer steps of the policy: none in the value model's warm-up."""
        return self.optimizer_steps * (self.train.steps - self.value_warmup_steps) // self.train.steps

    def arithmetic(self, world_size: int) -> str:
        """The batch vocabulary of this run, as a person would check it."""
        r, t = self.rollout, self.train
        if self.trains_on_rows:
            ranks = f"on {world_size} rank{'s' if world_size > 1 else ''}: {t.rows_per_step // world_size} each"
            return (
                f"step     {t.rows_per_step} rows ({ranks}), one optimizer step; microbatches of up to "
                f"{t.tokens_per_microbatch} tokens a rank\n"
                f"run      {t.steps} steps = {t.steps * t.rows_per_step} rows"
            )
        ranks = f"on {world_size} rank{'s' if world_size > 1 else ''}: {self.episodes_per_step // world_size} each"
        minibatch = self.episodes_per_step // t.minibatches_per_batch
        updates = t.epochs_per_batch * t.minibatches_per_batch
        where = f"on {self.generating_ranks} rank(s) of their own" if self.generating_ranks else "by a thread"
        ahead = f"batches are sampled {where}, at most {self.schedule.staleness} update(s) before they are trained on"
        overlaps = self.generating_ranks or self.schedule.staleness
        return "\n".join(
            [
                *([f"schedule {ahead}"] if overlaps else []),
                f"step     {r.prompts_per_step} prompts x {r.samples_per_prompt} samples = "
                f"{self.episodes_per_step} episodes ({ranks})",
                f"update   {t.epochs_per_batch} epoch(s) x {t.minibatches_per_batch} minibatch(es) of {minibatch} "
                f"episodes = {updates} optimizer steps; microbatches of up to {t.tokens_per_microbatch} tokens a rank",
                f"run      {t.steps} steps = {t.steps * self.episodes_per_step} episodes, "
                f"{self.optimizer_steps} optimizer steps",
            ]
        )


def _with_sections(base: type[Any], algorithms: Iterable[Algorithm]) -> Any:
    """The tree with the algorithms' own sections besides."""
    sections = {one.section: one.Settings for one in algorithms if one.Settings}
    fields: dict[str, Any] = {key: (kind, Field(default_factory=kind)) for key, kind in sections.items()}
    return create_model("Config", __base__=base, __doc__=base.__doc__, **fields)


if TYPE_CHECKING:

    class Config(_Config):
        """One run of Tandem."""

else:
    Config = _with_sections(_Config, BUILT_IN.values())


def config_with(algo: str, algorithm: Algorithm) -> type[Config]:
    """The tree of a run by an algorithm that is not built in, which the value ``algo`` of its key names."""

    class WithAlgorithm(Config):
        algorithms: ClassVar[Mapping[str, Algorithm]] = {**BUILT_IN, algo: algorithm}

    WithAlgorithm.__doc__ = Config.__doc__
    return cast(type[Config], _with_sections(WithAlgorithm, [algorithm]))


class ConfigError(ValueError):
    """The configuration cannot work; the message is one line that says why and what to do."""
