"""Sections about what a step does: rollout batches, sampling, the update, the hold on the reference policy."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from algorithms.base import KLEstimator, NonNegative, Positive, Section

Decay = Annotated[float, Field(ge=0, lt=1)]


class Rollout(Section):
    """What one generation phase makes, counted over all ranks."""

    prompts_per_step: Positive = Field(
        64,
        description="Prompts in a rollout batch, over all ranks; where the data has fewer, the next epochs fill it up",
    )
    samples_per_prompt: Positive = Field(4, description="Responses sampled for each prompt (a group)")
    max_prompt_tokens: Positive = Field(
        512, description="Longest prompt, in tokens; longer ones are dropped at load and counted"
    )
    max_response_tokens: Positive = Field(128, description="Longest response, in tokens, end-of-sequence included")
    missing_eos_penalty: NonNegative | None = Field(
        None, description="Subtracted from the reward of a response cut off by its length. Default: nothing"
    )
    missing_eos_reward: float | None = Field(
        None, description="Replaces the reward of a response cut off by its length. Default: nothing"
    )
    max_skipped_batches: Annotated[int, Field(ge=0)] = Field(
        10,
        description="Rollout batches in a row that may have no response to train on, for want of scores: each counts "
        "as a step that changes no weight. One more ends the run; 0 allows none",
    )


class Generation(Section):
    """How responses are sampled."""

    backend: Literal["hf", "vllm"] = Field(
        "hf", description="Sampler: transformers' own generation, or vLLM in process"
    )
    temperature: Annotated[float, Field(gt=0)] = Field(
        1.0, description="Sampling temperature; the trainer's log-probabilities use the same one"
    )
    top_p: float = Field(
        1.0, description="Must stay 1: truncated sampling biases the policy ratio by the probability mass it keeps"
    )
    stop_tokens: list[str] = Field(
        default_factory=list,
        description="Further tokens that end a response, beside those that the model's files declare; each one token "
        "of the tokenizer",
    )
    tensor_parallel: Positive = Field(1, description="Ranks that share one vLLM engine")
    max_batch: Positive = Field(256, description="Most responses sampled at a time on one rank")
    max_logprob_gap: Annotated[float, Field(gt=0)] = Field(
        0.1,
        description="The run fails when sampler and trainer disagree by more than this about the sampled tokens: mean "
        "absolute log-probability difference over a minibatch, in nats",
    )


class Train(Section):
    """The update: minibatches are optimizer steps, microbatches are forward passes."""

    steps: Positive = Field(100, description="Batches to train on")
    epochs: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="With an algorithm that trains on rows: passes over the data set, in place of train.steps, which "
        "follows: whole batches, the last one filled up from the next pass",
    )
    rows_per_step: Positive = Field(
        64, description="With an algorithm that trains on rows: rows in a batch, over all ranks"
    )
    learning_rate: NonNegative = Field(1e-6, description="Peak learning rate of the policy (AdamW)")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Learning rate after warm-up, over all optimizer steps of the run; decays to 0"
    )
    warmup_steps: Annotated[int, Field(ge=0)] = Field(0, description="Optimizer steps of linear warm-up")
    epochs_per_batch: Positive = Field(1, description="Passes over one rollout batch")
    minibatches_per_batch: Positive = Field(1, description="Optimizer steps in one pass over a rollout batch")
    tokens_per_microbatch: Positive = Field(
        8192, description="Token budget of one forward pass on one rank, prompts and responses packed without padding"
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(0, description="DeepSpeed ZeRO stage")
    optimizer_offload: Literal["none", "cpu"] = Field(
        "none",
        description="cpu: fp32 weights, AdamW's states and gradients are in host memory always, and the CPU makes the "
        "optimizer steps, which takes longer; with zero_stage 2 or 3. (memory.offload: only while generating)",
    )
    max_grad_norm: NonNegative = Field(1.0, description="Gradient clipping by global norm; 0 turns it off")
    adam_betas: tuple[Decay, Decay] = Field((0.9, 0.95), description="AdamW's two decay rates")
    adam_eps: Annotated[float, Field(gt=0)] = Field(1e-8, description="AdamW's epsilon")
    weight_decay: NonNegative = Field(0.0, description="AdamW's decoupled weight decay")
    clip_low: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.2, description="The policy ratio is clipped below at 1 - clip_low"
    )
    clip_high: Annotated[float, Field(gt=0)] = Field(
        0.2, description="The policy ratio is clipped above at 1 + clip_high"
    )
    entropy_coef: float = Field(0.0, description="Weight of the entropy bonus in the loss, per token")
    workspace_gib: Annotated[float, Field(gt=0)] = Field(
        1.25, description="Most memory the loss kernels may use besides the gradients, in GiB"
    )
    kernel_backend: Literal["triton", "cpu", "reference"] | None = Field(
        None, description="Backend of the loss kernels. Default: the fastest one there is for the device"
    )

    @model_validator(mode="after")
    def _one_length(self) -> Train:
        if self.epochs is not None and "steps" in self.model_fields_set:
            raise ValueError("give train.steps or train.epochs, from which the steps follow, not both")
        return self


class KL(Section):
    """Distance kept to the frozen reference policy."""

    coef: NonNegative = Field(
        0.05,
        description="Weight of the KL penalty, per nat: in the reward or in the loss, as the algorithm has it; 0 runs "
        "without a reference model. Online DPO has dpo.beta instead, BoK none",
    )
    estimator: KLEstimator | None = Field(
        None,
        description="Estimator of the KL: k1 is log-policy minus log-reference, the only one inside a reward. Default: "
        "the algorithm's, for GRPO k3",
    )
    target: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Adaptive coefficient (Ziegler et al. 2019): KL of a response to aim at, in nats"
    )
    horizon: Positive = Field(
        10000,
        description="Episodes over which the adaptive coefficient changes by its relative error (cut to 20 percent)",
    )


class OffPolicy(Section):
    """Correction for the distance between the sampler's and the trainer's policy."""

    correction: bool | None = Field(
        None,
        description="Truncated importance weights min(exp(old - behaviour), cap), where the loss has a policy ratio. "
        "Default: on when samples are stale, or the sampler computes in other numerics than the trainer",
    )
    cap: Annotated[float, Field(ge=1)] = Field(2.0, description="Largest importance weight")
