"""The settings of the commands that come after a run. Where a key means what it means in a run it has the same name.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import Field, create_model

from algorithms.base import NonNegative, Positive, Section
from engine.config import Config, Data, cli, help_text, yaml_file
from engine.config.inputs import Model, Reward
from engine.config.keys import leaves
from engine.config.learning import Generation, Rollout, Train
from engine.config.running import Launch, Memory, Push

Dtype = Literal["float32", "bfloat16", "float16"]


def _part(section: type[Section], doc: str, *names: str) -> Any:
    """Some keys of a run's section, with their descriptions and defaults."""
    fields: dict[str, Any] = {
        name: (section.model_fields[name].annotation, section.model_fields[name]) for name in names
    }
    return create_model(section.__name__, __base__=Section, __doc__=doc, **fields)


NOT_OF_PAIRS = {"completion_column", "messages_column", "margin_column", "loss_on", "max_row_tokens", "too_long"}
NOT_OF_PAIRS |= {"eval_path", "eval_name", "eval_split", "eval_fraction", "eval_overlap", "shuffle"}
NOT_OF_PAIRS |= {"mixture", "new_special_tokens"}
"""Keys of ``data`` that say nothing about pairs to relabel."""

if TYPE_CHECKING:
    from engine.config.inputs import Data as _Chat
    from engine.config.inputs import Data as _Pairs
    from engine.config.inputs import Model as _Dtype
    from engine.config.learning import Generation as _Sampler
    from engine.config.learning import Rollout as _Length
    from engine.config.learning import Train as _Budget
    from engine.config.running import Launch as _Device
    from engine.config.running import Memory as _Cache
else:
    _Pairs = _part(Data, "The pairs or responses.", *(name for name in Data.model_fields if name not in NOT_OF_PAIRS))
    _Chat = _part(Data, "How a row's prompt becomes tokens.", "chat_template", "chat_template_kwargs", "tools_column")
    _Budget = _part(Train, "The numbers of tokens that are computed at once.", "tokens_per_microbatch")
    _Dtype = _part(Model, "The numbers that models compute in.", "dtype")
    _Length = _part(Rollout, "Lengths of prompts and responses.", "max_prompt_tokens", "max_response_tokens")
    _Sampler = _part(Generation, "How responses are sampled.", "backend", "stop_tokens", "max_batch")
    _Cache = _part(Memory, "Memory of the sampler.", "kv_cache_gib")
    _Device = _part(Launch, "Where to compute.", "device")


class Responses(_Length):
    """Prompts and responses."""

    samples_per_prompt: Positive = Field(1, description="Responses sampled for each prompt")


class Sampler(_Sampler):
    """How responses are sampled."""

    temperature: NonNegative = Field(1.0, description="Sampling temperature; 0 is greedy")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Draw from the fewest tokens that have this much probability together; 1 draws from all"
    )
    top_k: Annotated[int, Field(ge=0)] = Field(
        0, description="Draw from so many of the most probable tokens; 0 draws from all"
    )
    stop_strings: list[str] = Field(
        default_factory=list,
        description="Texts that end a response: its text is cut before the first of them, its tokens after the one "
        "that completes it",
    )


class Export(Section):
    """A checkpoint as a Hugging Face folder."""

    output: str | None = Field(None, description="Folder to write; there must be none of that name")
    dtype: Dtype | None = Field(None, description="Numbers of the weights. Default: those of the run (model.dtype)")
    lora: Literal["merged", "adapter"] = Field(
        "merged", description="Of a run with lora.rank: the whole policy, or its adapter alone in peft's format"
    )
    push: Push = Field(default_factory=Push)


class _Sampled(Section):
    """What responses are sampled for, and how."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(0, description="Fixes what is sampled")
    prompts: Literal["train", "held_out"] | None = Field(
        None,
        description="Those that a run trains on, or the held-out ones (data.eval_path, data.eval_split, "
        "data.eval_fraction, or those of an embedded task). Default: held_out where the settings have them",
    )
    limit: Positive | None = Field(None, description="Prompts used, the first ones. Default: all")
    model: _Dtype = Field(default_factory=_Dtype)
    data: Data = Field(default_factory=Data)
    rollout: Responses = Field(default_factory=Responses)
    generation: Sampler = Field(default_factory=Sampler)
    memory: _Cache = Field(default_factory=_Cache)
    launch: _Device = Field(default_factory=_Device)

    @property
    def held_out(self) -> bool:
        """True where the prompts are the held-out ones."""
        return self.data.has_held_out if self.prompts is None else self.prompts == "held_out"


class Generate(_Sampled):
    """Responses of one model."""

    output: str | None = Field(None, description="File to write, .jsonl or .parquet; there must be none of that name")


class Judge(Section):
    """What says which of two responses is better, where that is no score of each (reward.*)."""

    pairwise: str | None = Field(
        None,
        description="Python function 'module:function' or 'file.py:function', called with keyword lists prompts, "
        "completions_a, completions_b and the data set's columns, or those of them that it names; returns for each "
        "pair a number above 0 if a is better, below 0 if b is, 0 for a tie. Instead of reward.*",
    )


class Baseline(Section):
    """What responses are compared with. Default: of a run, the model that training began with; else the first model."""

    column: str | None = Field(None, description="Column of the data with a response to each prompt")
    model: str | None = Field(None, description="One of the models that are evaluated, by its name in the table")


class Evaluate(_Sampled):
    """Figures about models."""

    output: str | None = Field(
        None, description="Folder of the results. Default: evaluation, in the run's folder where one run is evaluated"
    )
    reward: Reward = Field(default_factory=Reward)
    judge: Judge = Field(default_factory=Judge)
    baseline: Baseline = Field(default_factory=Baseline)
    reference: str | None = Field(
        None,
        description="Model that KL and perplexity are measured against: the name in the table of one that is "
        "evaluated, a folder or a hub name. Default: of a run, its own reference; else none",
    )


class Texts(_Dtype):
    """The numbers that a reward model computes in, and how texts become tokens."""

    path: str | None = Field(
        None,
        description="Model whose tokenizer and chat template write prompts and answers out, a folder or hub name. "
        "Default: reward.model",
    )


class Relabel(Section):
    """Pairs in a judge's order."""

    output: str | None = Field(None, description="File to write, .jsonl or .parquet; there must be none of that name")
    limit: Positive | None = Field(None, description="Rows used, the first ones. Default: all")
    ties: Literal["drop", "keep"] = Field(
        "drop", description="Pairs with equal scores: left out, or kept in the order that they are given in"
    )
    responses_column: str = Field(
        "responses", description="Column with a list of responses to data.prompt_column, in rows without a pair"
    )
    data: _Pairs = Field(default_factory=_Pairs)
    reward: Reward = Field(default_factory=Reward)
    model: Texts = Field(default_factory=Texts)
    launch: _Device = Field(default_factory=_Device)


class ServeReward(Section):
    """A reward model as an HTTP server."""

    host: str = Field(
        "127.0.0.1",
        description="Address to listen on. The default is for this machine alone, 0.0.0.0 for any that reaches it",
    )
    port: Annotated[int, Field(ge=0, le=65535)] = Field(8000, description="Port to listen on; 0 takes a free one")
    model: _Dtype = Field(default_factory=_Dtype)
    data: _Chat = Field(default_factory=_Chat)
    train: _Budget = Field(default_factory=_Budget)
    launch: _Device = Field(default_factory=_Device)


S = TypeVar("S", bound=Section)


def read(kind: type[S], command: cli.Command, below: Mapping[str, Any], *, usage: str, description: str) -> S:
    """The settings of a command: defaults, what lies below, the file of ``--config``, and the options over them.

    Args:
        below: settings of the run that the command works on, nested.

    Raises:
        ConfigError: an unknown key, a wrong type, an unreadable file.
        SystemExit: after ``--help``.
    """
    if command.help:
        print(help_text.of(kind, usage, description, "command"), end="")
        raise SystemExit(0)
    over = yaml_file.read(command.config) if command.config else {}
    cli.assign_options(over, kind, command)
    tree = dict(below)
    for replaced in (_without_sources, _without_judge):
        replaced(tree, over)
    merge(tree, over)
    return cli.checked(kind, tree)


SOURCES = {
    "data": (
        {"task", "path", "mixture"},
        {"task", "path", "mixture", "name", "split", "eval_path", "eval_name", "eval_split", "eval_fraction"},
    ),
    "reward": ({"function", "model", "url"}, {"function", "model", "url", "weights"}),
}
"""Keys of a section one of which names another source, and those that are about the source of the run then."""


def _without_sources(tree: dict[str, Any], over: Mapping[str, Any]) -> None:
    """Takes out what a run's settings say about a source that the command's own replace by another."""
    for section, (naming, about) in SOURCES.items():
        given = over.get(section)
        if isinstance(given, Mapping) and naming & given.keys():
            tree[section] = {key: value for key, value in tree.get(section, {}).items() if key not in about}


def _without_judge(tree: dict[str, Any], over: Mapping[str, Any]) -> None:
    """A judge of pairs takes the place of the run's own scores."""
    if isinstance(over.get("judge"), Mapping) and "reward" not in over:
        tree.pop("reward", None)


def merge(tree: dict[str, Any], over: Mapping[str, Any]) -> None:
    """Puts nested settings over others; a section keeps the keys that the upper one does not have."""
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            merge(tree[key], value)
        else:
            tree[key] = value


OWN = {"seed", "rollout.samples_per_prompt", "generation.temperature", "generation.top_p"}
"""What a command has defaults of its own for: a run's are about training."""


def of_run(kind: type[Section], run: Config) -> dict[str, Any]:
    """What a run's settings say about a command's keys, nested."""
    keys = {key for key, _ in leaves(kind)} - OWN
    tree: dict[str, Any] = {}
    for key, value in cli.flat(run):
        if key in keys:
            yaml_file.assign(tree, key, value)
    return tree


def as_config(settings: _Sampled | Relabel | ServeReward, model: str | None) -> Config:
    """A run's settings with a command's in them, for the parts of the engine that take these.

    Args:
        model: folder or hub name of the policy; None for the starting checkpoint of an embedded task.
    """
    whole = Config()
    changed: dict[str, Any] = {"seed": settings.seed} if isinstance(settings, _Sampled) else {}
    for name in type(settings).model_fields:
        section, ours = getattr(whole, name, None), getattr(settings, name)
        if isinstance(section, Section) and isinstance(ours, Section):
            common = {key: getattr(ours, key) for key in type(ours).model_fields if key in type(section).model_fields}
            changed[name] = section.model_copy(update=common)
    changed["model"] = changed["model"].model_copy(update={"path": model})
    return whole.model_copy(update=changed)


def as_reward_model(config: Config, folder: str) -> Config:
    """The settings with a reward model's folder for model and judge alike; prompts are read as a policy saw them."""
    changed: dict[str, Section] = {
        "model": config.model.model_copy(update={"path": folder}),
        "reward": config.reward.model_copy(update={"model": folder}),
        "data": config.data.model_copy(update={"templated": True}),
    }
    return config.model_copy(update=changed)
