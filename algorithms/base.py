"""What an algorithm is: a record of what it needs, the settings of its own, and its objective.

``Algorithm`` is what one derives from to write one; docs/extending.md builds an example. This module imports no torch
and nothing of the engine: records are read, and settings checked, before anything heavy is imported.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

if TYPE_CHECKING:
    from torch import Tensor

    from algorithms.rollout import Objective, Rollout

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Unit = Annotated[float, Field(ge=0, le=1)]

KLEstimator = Literal["k1", "k2", "k3"]
Ratio = Literal["token", "sequence", "sequence_mean"]
DualClip = Annotated[
    Annotated[float, Field(gt=1)] | None,
    Field(
        description="Dual clip (Ye et al. 2020, arXiv 1912.09729): the loss of a token with a negative advantage A is "
        "at most -A times this, however large the policy ratio. Default: no such bound"
    ),
]


class Section(BaseModel):
    """A section of the configuration: no unknown keys, no NaN or infinity, defaults checked like everything else.

    Every field has a type, a default and a ``Field(..., description=...)`` with its unit, which ``--help`` shows.
    """

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


class ValueModelSettings(Section):
    """How the value model is trained; an algorithm that has one extends these settings by its own."""

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


@dataclass(frozen=True, slots=True)
class Run:
    """What an objective may know of the run besides its own settings and the rollout batch."""

    step: int
    """Rollout batches trained on before this one."""
    kl_coef: float
    """Current coefficient of the KL penalty, per nat."""
    kl_estimator: KLEstimator
    """Estimator of a KL term in the loss, one of ``kernels.linear_policy_loss``."""
    max_response_tokens: int
    """Longest response, in tokens."""
    reduce: Callable[[Tensor], Tensor]
    """Elementwise sum over the ranks that share a rollout batch; the identity on one rank. Collective."""
    gather: Callable[[Tensor], tuple[Tensor, slice]]
    """The ranks' vectors end to end, in the order of the ranks, and which part of it is this rank's. Their lengths may
    differ. Collective."""


class Algorithm(ABC):
    """An algorithm: class attributes that say what it needs of the engine, and ``objective``.

    It keeps no state: there is one instance in a process, and what it computes follows from its arguments.
    """

    name: ClassVar[str]
    """What it is called in run folders, reports and messages, and by ``--algo`` if it is built in."""
    Settings: ClassVar[type[Section] | None] = None
    """Its settings; None without any."""
    section: ClassVar[str] = ""
    """The key of its settings in the configuration. Default: ``name``."""
    value_model: ClassVar[bool] = False
    """It learns from a value model's estimates; ``Settings`` then extends ``ValueModelSettings``."""
    reference: ClassVar[bool] = False
    """It needs the frozen reference policy in any case, not only for a KL penalty."""
    kl: ClassVar[Literal["reward", "loss"] | None] = None
    """Where it has a KL penalty, weighted by ``kl.coef``: the objective makes it part of the rewards, or the loss has a
    term of it; None without one. With ``kl.coef`` above 0 the run then holds the reference policy."""
    kl_estimator: ClassVar[KLEstimator] = "k1"
    """Default of ``kl.estimator``; inside a reward there is k1 alone."""
    policy_ratio: ClassVar[bool] = False
    """Its loss is of the ratio of new to old policy, which samples of an older policy bias: ``off_policy.correction``
    then multiplies each ratio by a truncated importance weight."""
    least_group: ClassVar[int] = 1
    """Fewest scored responses to a prompt that it can learn from; prompts with fewer are left out."""
    rows: ClassVar[Literal["single", "pair"]] = "single"
    """What lies side by side in a forward pass: responses by themselves, or pairs of them."""
    batches: ClassVar[Literal["sampler", "rows"]] = "sampler"
    """Where its batches come from: responses that the sampler draws, or rows of a data set."""
    head: ClassVar[Literal["language", "score"]] = "language"
    """What the trained model ends in: a policy's head, which gives tokens' log-probabilities, or a reward model's,
    which gives a whole sequence one number. The second is trained on pairs of a data set's rows."""

    def __init_subclass__(cls) -> None:
        if "Settings" in vars(cls) and "section" not in vars(cls):
            cls.section = getattr(cls, "name", "")

    @abstractmethod
    def objective(self, rollout: Rollout, settings: Any, run: Run) -> Objective:
        """What the update minimises on a rollout batch.

        Called on every rank with its own part of the batch, which may be empty, though not everywhere; whatever is
        collective in it is called on all ranks alike. Imports what it takes of torch by itself, so that the record can
        be read without.

        Args:
            rollout: this rank's responses with their scores, and log-probabilities and values where the record asks for
                them.
            settings: the run's ``Settings``; None for an algorithm without any.
            run: what else it may know.
        """

    def fault(self, settings: Any) -> str | None:
        """One line, without its end, about settings that are right by themselves and do not go together; else None."""
        return None

    def ratio(self, settings: Any) -> Ratio:
        """With ``policy_ratio``: whether the loss's ratios, and so its importance weights, are one a token or one a
        response, the product over its tokens or their geometric mean, as in ``kernels.linear_policy_loss``."""
        return "token"
