"""Policy, value model and reward model: a transformers backbone over packed rows, with our own head.

The heads are modules that are called, so that ZeRO-3's hooks gather their weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationConfig, PreTrainedModel

import kernels
from engine.config import ConfigError
from engine.config.quoted import kind_and_words, words
from engine.training import attention, behaviour
from engine.training.packing import Microbatch


@dataclass(frozen=True, slots=True)
class Check:
    """A comparison with transformers' own forward pass, made when a model is loaded."""

    name: str
    """The setting and the model, for messages."""
    device: torch.device
    """Where to compute it: the run's own device, whose attention is the one to compare."""


class FusedHead(nn.Linear):
    """A language-model head that gives log-probabilities or a loss without ever storing the logits."""

    softcap: float | None = None

    @classmethod
    def replacing(cls, head: nn.Linear, softcap: float | None) -> FusedHead:
        """The same weight (the very parameter, so tying holds) under this class."""
        with torch.device("meta"):
            fused = cls(head.in_features, head.out_features, bias=head.bias is not None)
        fused.weight, fused.bias, fused.softcap = head.weight, head.bias, softcap
        return fused

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        targets: Tensor,
        loss: dict[str, Any] | None = None,
        most_likely: bool = False,
        **options: Any,
    ) -> Any:
        """The loss that takes the arguments in ``loss``, of pairs or not; without any, ``kernels.linear_logprob``.

        With ``most_likely`` the loss's outputs are followed by [R] bool: which targets are the most likely tokens.
        """
        options.update(bias=self.bias, softcap=self.softcap)
        if loss is None:
            return kernels.linear_logprob(hidden, self.weight, targets, **options)
        kernel: Any = kernels.linear_preference_loss if "pair_weights" in loss else kernels.linear_policy_loss
        outputs = tuple(kernel(hidden, self.weight, targets, **loss, **options))
        return (*outputs, self._most_likely(hidden, options["workspace_gib"]) == targets) if most_likely else outputs

    def _most_likely(self, hidden: Tensor, workspace_gib: float) -> Tensor:
        """[R] the most likely tokens; a soft cap keeps their order. Logits exist some rows at a time."""
        rows = max(1, int(workspace_gib * 2**30) // (hidden.element_size() * self.out_features))
        logits = (nn.functional.linear(part, self.weight, self.bias) for part in hidden.split(rows))
        return torch.cat([part.argmax(-1) for part in logits])


class Policy(nn.Module):
    """A causal language model over packed microbatches."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        softcap = getattr(model.config, "final_logit_softcapping", None)
        model.set_output_embeddings(FusedHead.replacing(model.get_output_embeddings(), softcap))
        self.model = model

    def forward(self, batch: Microbatch, loss: dict[str, Any] | None = None, **options: Any) -> Any:
        """Runs the backbone and hands the R rows that predict a response token to the head.

        Returns:
            without ``loss``: [R] fp32 log-probabilities in nats; with it: the tuple of ``kernels.PolicyLossOutput`` or
            ``kernels.PreferenceLossOutput``.
        """
        hidden = _hidden(self.model, batch)[batch.rows]
        return self.model.get_output_embeddings()(hidden, batch.targets, loss, **options)


class Value(nn.Module):
    """A scalar estimate at every state: a sequence classifier with one label, read at every token."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Microbatch) -> tuple[Tensor, Tensor]:
        """Estimates before each response token, [R] fp32, and after the last one, [S] fp32."""
        hidden = _hidden(self.model, batch)
        values: Tensor = self.model.score(hidden[torch.cat([batch.rows, batch.last])])[:, 0].float()
        return values.split([len(batch.rows), len(batch.last)])


class RewardModel(nn.Module):
    """A score of a whole sequence: a sequence classifier with one label, read at the last token."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Microbatch) -> Tensor:
        """Scores of the sequences, [S] fp32."""
        scores: Tensor = self.model.score(_hidden(self.model, batch)[batch.last])
        return scores[:, 0].float()


def _hidden(model: Any, batch: Microbatch) -> Tensor:
    """[N, H] last hidden states of a packed row."""
    return model.base_model(
        input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, packed=batch.layout
    ).last_hidden_state[0]


def load_policy(
    path: str,
    gradient_checkpointing: bool = False,
    dtype: torch.dtype = torch.float32,
    check: Check | None = None,
) -> Policy:
    """A policy from a Hugging Face folder, in host memory; dropout off.

    Args:
        path: a folder or hub name.
        gradient_checkpointing: recompute each layer's activations in the backward pass.
        dtype: of the weights; the one that the model will compute in, so that no wider copy is ever made.
        check: compare with transformers' own forward pass. Default: don't.

    Raises:
        ConfigError: the folder holds no causal language model, or lacks weights, or, with ``check``, the model gives
            other log-probabilities here than in transformers.
    """
    model, _ = _load(AutoModelForCausalLM, path, dtype)
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        raise ConfigError(
            f"'{path}' ({type(model).__name__}) has no head that is a plain product, which training needs"
        )
    own = behaviour.own_logprobs(model.to(check.device), check.name) if check else None
    policy = Policy(_packed(_prepare(model, gradient_checkpointing), path))
    if check and own:
        behaviour.check_policy(policy, own, check.name)
        policy.to("cpu")
    return policy


def load_value(
    path: str,
    gradient_checkpointing: bool = False,
    dtype: torch.dtype = torch.float32,
    check: Check | None = None,
) -> tuple[Value, bool]:
    """A value model likewise, and whether its head is new (a causal model has none: it starts at zero)."""
    model, missing = _load_classifier(path, dtype)
    own = None
    if check:
        if missing:  # a head of zeros would hide what the rest computes
            nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(0))
        own = behaviour.own_scores(model.to(check.device), check.name)
    value = Value(_packed(_prepare(model, gradient_checkpointing), path))
    if check and own:
        behaviour.check_scores(model, lambda batch: value(batch)[1], own, check.name)
        value.to("cpu")
    if missing:
        for parameter in model.score.parameters():
            nn.init.zeros_(parameter)
    return value, bool(missing)


def load_reward_model(
    path: str,
    padding: int,
    seed: int,
    gradient_checkpointing: bool = False,
    dtype: torch.dtype = torch.float32,
    check: Check | None = None,
) -> tuple[RewardModel, bool]:
    """A reward model likewise, and whether its head is new.

    A new head is drawn from the seed, from a normal distribution of variance 1 / (hidden size + 1), as by Stiennon et
    al. 2020 (arXiv 2009.01325): of normalised states it makes scores about as far apart as 1.

    Args:
        path: of a causal language model, or of a sequence classifier with one label to go on with.
        padding: token id that the model's configuration is to name, so that transformers finds the last token of a
            padded sequence; an id behind the vocabulary gets an embedding of zeros.
    """
    model, missing = _load_classifier(path, dtype)
    if missing:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(model.score.weight.shape, generator=generator) / (model.score.in_features + 1) ** 0.5
        with torch.no_grad():
            model.score.weight.copy_(drawn)
    own = behaviour.own_scores(model.to(check.device), check.name) if check else None
    _name_padding(model, padding)
    reward_model = RewardModel(_packed(_prepare(model, gradient_checkpointing), path))
    if check and own:
        behaviour.check_scores(model, reward_model, own, check.name)
        reward_model.to("cpu")
    return reward_model, bool(missing)


def _name_padding(model: Any, padding: int) -> None:
    config = model.config.get_text_config()
    config.pad_token_id = padding
    if padding >= config.vocab_size:
        model.resize_token_embeddings(padding + 1, mean_resizing=False)
        with torch.no_grad():
            model.get_input_embeddings().weight[padding].zero_()


def _load_classifier(path: str, dtype: torch.dtype) -> tuple[Any, list[str]]:
    """A sequence classifier with one label, and the names of its head's weights where these are missing."""
    model, missing = _load(AutoModelForSequenceClassification, path, dtype, allow_missing=("score.",), num_labels=1)
    if not isinstance(getattr(model, "score", None), nn.Linear):
        raise ConfigError(
            f"'{path}' ({type(model).__name__}) is no decoder with a linear head called 'score', the only kind of "
            "value or reward model that can be loaded here; a reward model of another kind can be served: reward.url"
        )
    return model, missing


def _load(
    kind: Any, path: str, dtype: torch.dtype, allow_missing: tuple[str, ...] = (), **options: Any
) -> tuple[Any, list[str]]:
    """The model, and names of missing weights, which all begin as ``allow_missing`` says."""
    try:
        model, info = kind.from_pretrained(
            path, dtype=dtype, output_loading_info=True, trust_remote_code=False, **options
        )
    except Exception as error:  # OSError, ValueError, a KeyError of a configuration, SafetensorError, …
        raise ConfigError(
            f"'{path}' cannot be loaded as {kind.__name__}: {_faulty_file(path)}{kind_and_words(error, longest=300)}"
        ) from error
    missing = sorted(info["missing_keys"])
    lost = [name for name in missing if not allow_missing or not name.startswith(allow_missing)]
    if lost:
        raise ConfigError(f"'{path}' lacks weights of {kind.__name__}: {', '.join(lost[:4])}")
    return model, missing


def _faulty_file(path: str) -> str:
    """The file that loading fails for, where transformers' own words name none."""
    try:
        GenerationConfig.from_pretrained(path)
    except OSError:  # it has none, or one that is no JSON, whose words name it
        return ""
    except Exception:
        return "its generation_config.json: "
    return ""


def _packed(model: PreTrainedModel, path: str) -> PreTrainedModel:
    """Has the model attend inside each sequence of a packed row."""
    try:
        model.set_attn_implementation(attention.register())
    except Exception as error:
        raise ConfigError(
            f"'{path}' ({type(model).__name__}) cannot be used here: its attention cannot be replaced by one for "
            f"packed sequences ({words(error):.160})"
        ) from error
    return model


def _prepare(model: PreTrainedModel, gradient_checkpointing: bool) -> PreTrainedModel:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():  # models that call functional dropout keep its rate as a number
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    if gradient_checkpointing:
        recompute_activations(model)
    return model


def recompute_activations(model: PreTrainedModel) -> None:
    """Has a model's backward pass compute each layer's activations again instead of keeping them."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
