"""Sections about where and when a run computes: memory, schedule, processes, evaluation, checkpoints."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from algorithms.base import NonNegative, Positive, Section

HUB_ID = re.compile(r"([\w-][\w.-]*/)?[\w-][\w.-]*")


class Memory(Section):
    """The memory plan: what lives on each GPU while generating and while training. Every key may be left alone."""

    explain: bool = Field(
        False, description="Print the memory plan and exit; without a GPU, for one of memory.gpu_gib as well"
    )
    gpu_gib: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Memory of each GPU that the run may use, in GiB. Default: all there is"
    )
    sleep: Literal["auto", "none", "kv", "level1", "level2"] = Field(
        "auto",
        description="What vLLM gives up while training: nothing, its KV cache, or its weights too, which level1 keeps "
        "in host memory and level2 drops",
    )
    offload: Literal["auto", "on", "off"] = Field(
        "auto", description="Keep optimizer states and fp32 weights in host memory while generating"
    )
    zero_copy: Literal["auto", "off"] = Field(
        "auto",
        description="auto: one storage for the trainer's and vLLM's weights, where that works (Llama, Mistral, Qwen2 "
        "and Qwen3 in bfloat16 with ZeRO 0-2, taking turns, without LoRA, tensor parallelism or an odd vocabulary)",
    )
    kv_cache_gib: Annotated[float, Field(gt=0)] | None = Field(
        None, description="vLLM's KV cache on each rank, in GiB. Default: on a GPU as planned, on a CPU 1"
    )

    @field_validator("offload", mode="before")
    @classmethod
    def _yaml_switch(cls, value: Any) -> Any:
        return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value  # YAML's own words


class Schedule(Section):
    """Who runs where, and how far generation may run ahead."""

    placement: Literal["colocated", "split"] = Field(
        "colocated",
        description="Generation and training on the same devices; or split, on ranks of their own: the last generate",
    )
    staleness: Annotated[int, Field(ge=0)] = Field(
        0,
        description="Most updates between sampling a batch and training on it: 0 is synchronous, 1 generates a batch "
        "while the one before is trained on; colocated at most 1",
    )
    generators: Positive = Field(1, description="Ranks that generate in a split run; all others train")


class Launch(Section):
    """Processes and devices."""

    ranks: Positive | None = Field(
        None, description="Processes on this machine. Default: one for each GPU, one on a CPU. Under torchrun: its own"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where to compute; auto takes the GPU if there is one"
    )
    timeout_minutes: Annotated[float, Field(gt=0)] = Field(
        60.0, description="How long one rank waits for another before the run fails; longer than the longest rollout"
    )


class Eval(Section):
    """Held-out evaluation, greedy unless a temperature is given."""

    every_steps: Annotated[int, Field(ge=0)] = Field(
        10, description="Evaluate every so many steps, and before and after training; 0 only before and after"
    )
    prompts: Positive = Field(512, description="Held-out prompts or rows used, the first ones of the set")
    samples_per_prompt: Positive = Field(
        1, description="Responses to each prompt; from two on, whether any is right is measured as well (pass@k)"
    )
    temperature: NonNegative = Field(0.0, description="Sampling temperature of the evaluation; 0 is greedy")


class Report(Section):
    """Copies of the metrics for experiment trackers, beside report.html, metrics.jsonl and TensorBoard events."""

    wandb: str | None = Field(
        None,
        description="Project of Weights & Biases to log to (needs the package wandb, and wandb login or "
        "WANDB_MODE=offline)",
    )
    trackio: str | None = Field(None, description="Project of trackio to log to (needs the package trackio)")

    @property
    def projects(self) -> dict[str, str]:
        """The projects that are given, by the names of the packages."""
        given = {"wandb": self.wandb, "trackio": self.trackio}
        return {name: project for name, project in given.items() if project is not None}


class Push(Section):
    """Uploading the model to the Hugging Face hub when it is done; without this nothing is uploaded."""

    hub_id: str | None = Field(
        None, description="Repository for the model, NAME or OWNER/NAME (needs hf auth login, or HF_TOKEN)"
    )
    private: bool = Field(True, description="Whether a repository that is made for it is private")

    @field_validator("hub_id")
    @classmethod
    def _is_name(cls, name: str | None) -> str | None:
        if name is not None and not HUB_ID.fullmatch(name):
            raise ValueError("must be NAME or OWNER/NAME, of letters, digits, '-', '_' and '.'")
        return name


class Save(Section):
    """Checkpoints: written under another name, then renamed, so that a kill leaves the last good one."""

    every_steps: Annotated[int, Field(ge=0)] = Field(
        50, description="Write a checkpoint every so many steps, and at the end; 0 only at the end"
    )
    keep: Positive = Field(1, description="Checkpoints kept besides the newest")
    hf_every_steps: Annotated[int, Field(ge=0)] = Field(
        0,
        description="Write the policy as a Hugging Face folder models/step-N every so many steps, for engine.evaluate "
        "and engine.generate; save.keep removes none of them. 0: never",
    )
    best: bool = Field(
        True, description="Keep the policy that did best on the held-out prompts or rows, in the folder best"
    )
    samples_per_step: Annotated[int, Field(ge=0)] | Literal["all"] = Field(
        8,
        description="Samples (or rows) of each step, and held-out responses of each evaluation, written to "
        "samples.jsonl: so many of rank 0's; or all, of every rank, dropped ones too",
    )
