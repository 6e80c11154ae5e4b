"""The configuration tree: typed, documented, checked before anything heavy is imported.

Every leaf has a type, a default and a description with its unit; ``engine.config.cli`` turns them into command-line
options and ``--help``. This module imports no torch, so that a bad configuration fails in well under a second.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

Path = str
Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Unit = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of the tree: no unknown keys, no NaN or infinity, defaults checked like everything else."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, validate_default=True, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _bool_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        if (
            isinstance(value, bool)
            and info.field_name
            and "bool" not in str(cls.model_fields[info.field_name].annotation)
        ):
            raise ValueError("is not a yes-or-no setting")
        return value


class Model(Section):
    """The models and the numbers they compute in."""

    path: Path | None = Field(
        None,
        description="Policy to start from: a Hugging Face folder or hub name. Default: with an embedded task, the "
        "task's own starting checkpoint, trained once by a short supervised phase and cached",
    )
    value_path: Path | None = Field(
        None,
        description="Value model to start from (PPO): a causal language model (its value head starts at zero) or a "
        "sequence classifier with one label. Default: model.path",
    )
    reference_path: Path | None = Field(
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


class Data(Section):
    """Where prompts come from."""

    task: Literal["addition"] | None = Field(
        None, description="Embedded task with its own prompts, verifier, tokenizer and held-out problems"
    )
    path: Path | None = Field(
        None,
        description="Prompts: a .jsonl or .parquet file, or the name of a Hugging Face data set (needs the package "
        "datasets) or a folder laid out as one. Instead of data.task",
    )
    name: str | None = Field(
        None, description="Configuration of the Hugging Face data set data.path, such as main; for one that has several"
    )
    split: str = Field(
        "train", description="Split of a Hugging Face data set to train on; a file has none, so leave it out there"
    )
    eval_path: Path | None = Field(
        None, description="Held-out prompts, same formats as data.path. Default: no evaluation"
    )
    eval_name: str | None = Field(None, description="Configuration of the Hugging Face data set data.eval_path")
    eval_split: str | None = Field(None, description="Split of the Hugging Face data set data.path to evaluate on")
    prompt_column: str = Field(
        "prompt", description="Column with the prompt: a string, a list of chat messages, or a list of token ids"
    )
    eval_overlap: bool = Field(
        False, description="Let the held-out prompts be those that are trained on: the same file, or the same split"
    )
    chat_template: bool = Field(
        False, description="Wrap string prompts as a user message in the tokenizer's chat template"
    )
    templated: bool = Field(
        False,
        description="String prompts are in the model's template already: control tokens written in them count as such. "
        "Default: they are text",
    )
    shuffle: bool = Field(True, description="New order of the prompts every epoch, drawn from the seed")


class Reward(Section):
    """What a response is worth: a function, a reward model, a server, or the sum of several. Default: the verifier of
    the embedded task."""

    function: str | None = Field(
        None,
        description="Python reward: 'module:function' or 'file.py:function', called with keyword lists prompts, "
        "completions, prompt_ids, completion_ids, raw_prompts and the data set's columns, or those of them that it "
        "names; returns for each response a number, or None to drop it; may be async",
    )
    model: Path | None = Field(
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

    @property
    def sources(self) -> list[str]:
        """The keys of the sources that are given."""
        given = {"function": self.function, "model": self.model, "url": self.url}
        return [name for name, value in given.items() if value is not None]


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


class Train(Section):
    """The update: minibatches are optimizer steps, microbatches are forward passes."""

    steps: Positive = Field(100, description="Rollout batches to train on")
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


class KL(Section):
    """Distance kept to the frozen reference policy."""

    coef: NonNegative = Field(
        0.05,
        description="Weight of the KL penalty, per nat: in the reward, for GRPO in the loss; 0 runs without a "
        "reference model. Online DPO has dpo.beta instead, BoK none",
    )
    estimator: Literal["k1", "k2", "k3"] | None = Field(
        None,
        description="Estimator of the KL: k1 is log-policy minus log-reference, the only one inside a reward. Default: "
        "k1, for GRPO k3",
    )
    target: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Adaptive coefficient (Ziegler et al. 2019): KL of a response to aim at, in nats"
    )
    horizon: Positive = Field(
        10000,
        description="Episodes over which the adaptive coefficient changes by its relative error (cut to 20 percent)",
    )


class PPO(Section):
    """PPO's advantages and value model."""

    gamma: Unit = Field(1.0, description="Discount per token")
    lam: Unit = Field(0.95, description="GAE's lambda")
    whiten_advantages: bool = Field(
        True, description="Shift and scale advantages to mean 0, variance 1 over the rollout batch's response tokens"
    )
    bootstrap_truncated: bool = Field(
        False, description="Responses cut off by their length end with the value model's estimate instead of 0"
    )
    value_clip: Annotated[float, Field(gt=0)] = Field(
        0.2, description="New values are clipped to the old ones plus or minus this, in units of return"
    )
    value_coef: NonNegative = Field(0.1, description="Weight of the value loss")
    value_learning_rate: NonNegative | None = Field(
        None, description="Peak learning rate of the value model. Default: train.learning_rate"
    )
    value_warmup_steps: Annotated[int, Field(ge=0)] = Field(
        0, description="First steps in which only the value model is trained"
    )


class RLOO(Section):
    """RLOO's policy ratio."""

    ratio: Literal["sequence", "token"] = Field(
        "sequence", description="Clip one ratio a response (its product over tokens) or one a token"
    )


class GRPO(Section):
    """GRPO's advantages and mean."""

    scale_advantages: bool = Field(
        True, description="Divide a group's advantages by the standard deviation of its scores"
    )
    mean: Literal["token", "sequence"] = Field(
        "token", description="Mean of the loss over all tokens, or over responses of their token means (the paper's)"
    )


class DPO(Section):
    """Online DPO's preference loss."""

    beta: Annotated[float, Field(gt=0)] = Field(
        0.1, description="Strength of the hold on the reference policy, per nat of log-ratio"
    )
    loss: Literal["sigmoid", "ipo", "hinge"] = Field("sigmoid", description="Loss of a pair's margin")
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.0, description="Share of pairs taken to be labelled wrongly (with dpo.loss sigmoid)"
    )


class OffPolicy(Section):
    """Correction for the distance between the sampler's and the trainer's policy."""

    correction: bool | None = Field(
        None,
        description="Truncated importance weights min(exp(old - behaviour), cap) for PPO, RLOO and GRPO. Default: on "
        "when samples are stale, or the sampler computes in other numerics than the trainer",
    )
    cap: Annotated[float, Field(ge=1)] = Field(2.0, description="Largest importance weight")


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
    prompts: Positive = Field(512, description="Held-out prompts used, the first ones of the set")
    samples_per_prompt: Positive = Field(
        1, description="Responses to each prompt; from two on, whether any is right is measured as well (pass@k)"
    )
    temperature: NonNegative = Field(0.0, description="Sampling temperature of the evaluation; 0 is greedy")


class Save(Section):
    """Checkpoints: written under another name, then renamed, so that a kill leaves the last good one."""

    every_steps: Annotated[int, Field(ge=0)] = Field(
        50, description="Write a checkpoint every so many steps, and at the end; 0 only at the end"
    )
    keep: Positive = Field(1, description="Checkpoints kept besides the newest")
    best: bool = Field(True, description="Keep the policy that did best on the held-out prompts, in the folder best")
    samples_per_step: Annotated[int, Field(ge=0)] = Field(
        8, description="Samples of each step written to samples.jsonl"
    )


class Config(Section):
    """One run of Tandem."""

    algo: Literal["ppo", "rloo", "grpo", "online_dpo", "bok"] = Field("ppo", description="Algorithm")
    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        0, description="Fixes prompts' order, sampling, minibatches and new weights"
    )
    output_dir: Path = Field("runs", description="Folder that holds one folder a run")
    name: Annotated[str, Field(pattern=r"^[\w][\w.=+-]{0,99}$")] | None = Field(
        None, description="The run's folder in output_dir. Default: algorithm, data and time of day"
    )
    resume: Path | None = Field(
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
    ppo: PPO = Field(default_factory=PPO)
    rloo: RLOO = Field(default_factory=RLOO)
    grpo: GRPO = Field(default_factory=GRPO)
    dpo: DPO = Field(default_factory=DPO)
    off_policy: OffPolicy = Field(default_factory=OffPolicy)
    schedule: Schedule = Field(default_factory=Schedule)
    launch: Launch = Field(default_factory=Launch)
    eval: Eval = Field(default_factory=Eval)
    save: Save = Field(default_factory=Save)

    @model_validator(mode="before")
    @classmethod
    def _stringify_env(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and isinstance(raw.get("env"), dict):
            raw = {**raw, "env": {str(k): str(v) for k, v in raw["env"].items()}}
        return raw

    @property
    def generating_ranks(self) -> int:
        """Ranks that only generate."""
        return self.schedule.generators if self.schedule.placement == "split" else 0

    @property
    def has_policy_ratio(self) -> bool:
        """True for the losses of a ratio of new to old policy, which off-policy samples bias."""
        return self.algo in ("ppo", "rloo", "grpo")

    @property
    def least_group(self) -> int:
        """Fewest scored responses to a prompt that the algorithm can learn from."""
        return 2 if self.algo in ("rloo", "grpo", "online_dpo") else 1

    @property
    def has_reference(self) -> bool:
        """True where the run holds a frozen reference policy: for a KL penalty, or for pairs."""
        return self.algo == "online_dpo" or (self.kl.coef > 0 and self.algo != "bok")

    @property
    def loads_reference(self) -> bool:
        """True where the reference is a model of its own; with LoRA it can be the policy without its adapters."""
        return self.has_reference and not (self.lora.rank and self.model.reference_path is None)

    @property
    def eval_metric(self) -> str:
        """What the best policy is chosen by."""
        return "eval/accuracy" if self.has_verifier else "eval/reward"

    @property
    def has_verifier(self) -> bool:
        """True where scores are 0 or 1, right or wrong: the embedded task's own."""
        return not self.reward.sources

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
        """Responses in a rollout batch, over all ranks."""
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.train.steps * self.train.epochs_per_batch * self.train.minibatches_per_batch

    @property
    def policy_optimizer_steps(self) -> int:
        """Optimizer steps of the policy: none in the value model's warm-up."""
        warmup = self.ppo.value_warmup_steps if self.algo == "ppo" else 0
        return self.optimizer_steps * (self.train.steps - warmup) // self.train.steps

    def arithmetic(self, world_size: int) -> str:
        """The batch vocabulary of this run, as a person would check it."""
        r, t = self.rollout, self.train
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


class ConfigError(ValueError):
    """The configuration cannot work; the message is one line that says why and what to do."""
