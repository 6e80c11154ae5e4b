"""Sections about what a run begins with: models, prompts and rewards."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from algorithms.base import Positive, Section


def with_home(path: str | None) -> str | None:
    """A path with the user's home in place of a leading ``~``, which a shell puts there and a YAML file does not."""
    return path and os.path.expanduser(path)


class Model(Section):
    """The models and the numbers they compute in."""

    path: str | None = Field(
        None,
        description="Policy to start from: a Hugging Face folder or hub name; of --algo reward_model a causal language "
        "model, which gets a new head, or a reward model to go on with. Default: with an embedded task, the "
        "task's own starting checkpoint, trained once by a short supervised phase and cached",
    )
    value_path: str | None = Field(
        None,
        description="Value model to start from, where the algorithm has one: a causal language model (its value head "
        "starts at zero) or a sequence classifier with one label. Default: model.path",
    )
    reference_path: str | None = Field(
        None,
        description="Frozen reference policy. Default: model.path, which with lora.rank takes no memory of its own",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Numbers the models compute in; optimizer states and master weights are fp32 always"
    )
    gradient_checkpointing: bool | None = Field(
        None,
        description="Recompute each layer's activations in the backward pass: less memory, about 1/3 more time. "
        "Default: only where the memory plan finds a GPU too small without it",
    )

    @field_validator("path", "value_path", "reference_path")
    @classmethod
    def _at_home(cls, path: str | None) -> str | None:
        return with_home(path)


class Lora(Section):
    """Low-rank adapters (LoRA) instead of training every weight of the policy; needs the package peft."""

    rank: Annotated[int, Field(ge=0)] = Field(
        0, description="Rank of the adapters; 0 trains the policy's own weights. The value model is trained whole"
    )
    alpha: Positive = Field(32, description="Adapters count alpha / rank times")
    target_modules: list[str] = Field(
        default_factory=list,
        description="Linear layers with an adapter, such as [q_proj, v_proj]. Default: all but the head",
    )


SWITCH = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
"""Words of a command line for yes and no."""
TAKEN = {
    "conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
    "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs",
}  # fmt: skip
"""What ``apply_chat_template`` takes that is no variable of the template, or that rows and the engine fill."""


def _switch_or_file(given: Any) -> Any:
    """A template's file, or a switch, which a command line gives as text."""
    if not isinstance(given, str):
        return given
    if (word := given.strip().lower()) in SWITCH:
        return SWITCH[word]
    if not given.endswith(".jinja"):
        raise ValueError("must be true, false or the file of a template, whose name ends with .jinja")
    return with_home(given)


def _checked_names(given: list[str]) -> list[str]:
    for name in given:
        if name != name.strip() or not name or given.count(name) > 1:
            raise ValueError(f"{name!r} is empty, has a blank at its border, or comes twice")
    return given


def _checked_variables(given: dict[str, Any]) -> dict[str, Any]:
    if taken := sorted(given.keys() & TAKEN):
        raise ValueError(f"'{taken[0]}' is no variable of a template that a setting may give: leave it out")
    return given


class MixtureSource(Section):
    """One data set of ``data.mixture``."""

    path: str = Field(description="As data.path")
    name: str | None = Field(None, description="As data.name")
    split: str = Field("train", description="As data.split")
    weight: Annotated[float, Field(gt=0)] = Field(1.0, description="Its share of the rows, over the sum of all weights")
    prompt_column: str | None = Field(
        None, description="What this source calls the column data.prompt_column. Default: the same"
    )
    completion_column: str | None = Field(None, description="What it calls data.completion_column")
    messages_column: str | None = Field(None, description="What it calls data.messages_column")
    chosen_column: str | None = Field(None, description="What it calls data.chosen_column")
    rejected_column: str | None = Field(None, description="What it calls data.rejected_column")


class Data(Section):
    """Where prompts come from, and what the rows are that an algorithm learns from without sampling."""

    task: Literal["addition"] | None = Field(
        None, description="Embedded task with its own prompts, verifier, tokenizer and held-out problems"
    )
    path: str | None = Field(
        None,
        description="Prompts or rows: a .jsonl, .json (each may be gzipped: .gz) or .parquet file, a folder by "
        "save_to_disk or one laid out as a Hugging Face data set, or the name of such a data set (needs the package "
        "datasets). Instead of data.task",
    )
    name: str | None = Field(
        None, description="Configuration of the Hugging Face data set data.path, such as main; for one that has several"
    )
    split: str = Field(
        "train", description="Split of a Hugging Face data set to train on; a file has none, so leave it out there"
    )
    mixture: list[MixtureSource] = Field(
        default_factory=list,
        description="Several data sets instead of data.path: a list of {path, name, split, weight, prompt_column, "
        "...}. Every batch has rows of each in proportion to the weights, each in shuffled passes of its own",
    )
    eval_path: str | None = Field(
        None, description="Held-out prompts, same formats as data.path. Default: no evaluation"
    )
    eval_name: str | None = Field(None, description="Configuration of the Hugging Face data set data.eval_path")
    eval_split: str | None = Field(None, description="Split of the Hugging Face data set data.path to evaluate on")
    eval_fraction: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="Hold out this share of the prompts of data.path or data.mixture, chosen by a hash of the prompt: "
        "rows with equal prompts are on one side, whatever other rows there are",
    )
    prompt_column: str = Field(
        "prompt", description="Column with the prompt: a string, a list of chat messages, or a list of token ids"
    )
    completion_column: str = Field(
        "completion",
        description="With an algorithm that trains on rows: column with the answer to the prompt, a string or chat "
        "messages",
    )
    messages_column: str = Field(
        "messages",
        description="The same: column with a whole conversation, in rows without data.completion_column",
    )
    chosen_column: str = Field(
        "chosen",
        description="With an algorithm that trains on pairs: column with the better answer, a string or chat messages; "
        "without data.prompt_column in the row, the prompt is what both answers begin with",
    )
    rejected_column: str = Field("rejected", description="The same: column with the worse answer")
    tools_column: str | None = Field(
        None,
        description="Column with the tools of a conversation, for the chat template: a list of JSON schemas, or that "
        "list as text; null for a row without any. Default: no tools",
    )
    margin_column: str | None = Field(
        None,
        description="With a reward model: column with a number, by how much the better answer's score has to be above "
        "the other's. Default: 0 for every row",
    )
    loss_on: Literal["completion", "assistant"] = Field(
        "completion",
        description="With an algorithm that trains on rows: the loss is of what follows the prompt, of a conversation "
        "the last message; or of the assistant's messages all through it",
    )
    max_row_tokens: Positive = Field(
        1024, description="The same: longest sequence that a row becomes, prompt and completion, in tokens"
    )
    too_long: Literal["drop", "cut"] = Field(
        "drop", description="The same: rows beyond data.max_row_tokens are dropped, or lose their end; both are counted"
    )
    eval_overlap: bool = Field(
        False, description="Let the held-out prompts be those that are trained on: the same file, or the same split"
    )
    chat_template: Annotated[bool | str, BeforeValidator(_switch_or_file)] = Field(
        False,
        description="Wrap string prompts as a user message in the tokenizer's chat template; or the .jinja file of a "
        "template that takes its place, and is saved with the model",
    )
    new_special_tokens: Annotated[list[str], AfterValidator(_checked_names)] = Field(
        default_factory=list,
        description="Special tokens that the tokenizer may lack, such as [<|im_start|>, <|im_end|>]: they get rows in "
        "embedding and head, and are saved with the model",
    )
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_checked_variables)] = Field(
        default_factory=dict,
        description="Variables for the chat template, wherever it is filled, such as {enable_thinking: false}",
    )
    templated: bool = Field(
        False,
        description="String prompts are in the model's template already: control tokens written in them count as such. "
        "Default: they are text",
    )
    shuffle: bool = Field(True, description="New order of the prompts or rows every epoch, drawn from the seed")

    @property
    def changes_tokenizer(self) -> bool:
        """True where the policy's tokenizer gets a template from a file or new tokens."""
        return isinstance(self.chat_template, str) or bool(self.new_special_tokens)

    @property
    def label(self) -> str | None:
        """What the rows are called for people: the task, the data set, or those of a mixture; None without any."""
        mixture = " + ".join(source.path for source in self.mixture) or None
        return next((one for one in (self.task, self.path, mixture) if one is not None), None)

    @property
    def has_held_out(self) -> bool:
        """True where a setting says what is held out."""
        return any(one is not None for one in (self.task, self.eval_path, self.eval_split, self.eval_fraction))


class Reward(Section):
    """What a response is worth: a function, a reward model, a server, or the sum of several. Default: the verifier of
    the embedded task."""

    function: str | None = Field(
        None,
        description="Python reward: 'module:function' or 'file.py:function', called with keyword lists prompts, "
        "completions, prompt_ids, completion_ids, raw_prompts and the data set's columns, or those of them that it "
        "names; returns for each response a number, or None to drop it; may be async",
    )
    model: str | None = Field(
        None,
        description="Reward model: a Hugging Face sequence classifier with one label, a folder or hub name. Reads the "
        "policy's tokens if it has the same vocabulary, else the text",
    )
    url: str | None = Field(
        None,
        description="Reward server: is sent JSON with lists prompts, completions, raw_prompts and the data set's "
        'columns, answers {"scores": [...]} with for each response a number, or null to drop it',
    )
    weights: dict[str, float] = Field(
        default_factory=dict,
        description="Factors of the sources in the sum, such as {function: 1, model: 0.5}. Default: 1 each",
    )
    batch_size: Positive = Field(64, description="Responses in one request to reward.url")
    timeout_seconds: Annotated[float, Field(gt=0)] = Field(
        60.0, description="How long reward.url may stay silent before a request counts as failed"
    )
    batch_timeout_minutes: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="How long reward.function, or reward.url with all its waits, may take for a rank's part of a "
        "rollout batch before the run ends. Default: nine tenths of launch.timeout_minutes",
    )
    clip: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Clip the score of a response to [-clip, clip], in units of reward. Default: no clipping"
    )
    scale: Annotated[float, Field(gt=0)] = Field(
        1.0, description="Factor on the score of a response, after reward.clip and before rollout.missing_eos_*"
    )

    @field_validator("function", "model")
    @classmethod
    def _at_home(cls, path: str | None) -> str | None:
        return with_home(path)

    @property
    def sources(self) -> list[str]:
        """The keys of the sources that are given."""
        given = {"function": self.function, "model": self.model, "url": self.url}
        return [name for name, value in given.items() if value is not None]
