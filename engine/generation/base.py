"""What every sampler is: requests in, responses with their log-probabilities out, and a guarded life cycle.

    asleep --wake()--> weights --load_weights()--> weights (fresh) --start()--> ready --sleep()--> asleep

A sampler holds its own copy of the policy. While it sleeps its memory belongs to training, so a call in the wrong
state is a bug that would show up later as gibberish or corrupted memory; it raises here, naming state and call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from engine.generation.receipt import Held, Receipt, Sent

if TYPE_CHECKING:
    import torch

    from engine.sample import FinishReason

State = Literal["asleep", "weights", "ready"]
NamedTensors = Iterable[tuple[str, "torch.Tensor"]]
Text = tuple[list[int], list[int]]
"""Token ids of a prompt and of a response to it."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; shared by all requests of a call."""

    max_tokens: int
    """Longest response, in tokens, the stop token included."""
    temperature: float
    """0 is greedy; its log-probabilities are those at temperature 1."""
    stop_token_ids: tuple[int, ...]
    """Generation ends with the first of these; it is kept as the response's last token."""
    top_p: float = 1.0
    """Draws from the fewest tokens that have this much probability together; 1 draws from all, as training needs it."""
    top_k: int = 0
    """Draws from so many of the most probable tokens, before ``top_p``; 0 draws from all."""


@dataclass(frozen=True, slots=True)
class Request:
    """One response to be sampled."""

    prompt_ids: list[int]
    seed: int
    """0 <= seed < 2**63; the response depends on it and on nothing else that varies between batches or ranks."""


@dataclass(frozen=True, slots=True)
class Response:
    """One sampled response."""

    token_ids: list[int]
    logprobs: np.ndarray
    """[len(token_ids)] fp32, nats: log-probability of each token under the distribution it was drawn from."""
    finish_reason: FinishReason


class WrongStateError(RuntimeError):
    """A sampler was asked for something its state does not allow."""


class Generator(ABC):
    """A sampler of the current policy. Backends implement the underscored hooks."""

    def __init__(self) -> None:
        self.state: State = "ready"
        self.version = 0
        self.receipt: Receipt | None = None
        """Of the last hand-over. Whoever hands over looks whether it lost a tensor."""
        self.unread: list[str] = []
        """Tensors that cannot be read back from the sampler, by transformers' names."""
        self._built: dict[str, list[int]] = {}  # digests of what it loaded by itself, where its layout is its own
        self._fresh = True

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        """Samples one response for each request, in their order. Needs ``ready``."""
        self._expect("generate", "ready")
        return self._generate(requests, sampling)

    def logprobs(self, texts: Sequence[Text]) -> list[np.ndarray]:
        """[len(response)] fp32 log-probabilities of each given response, in nats at temperature 1. Needs ``ready``."""
        self._expect("logprobs", "ready")
        return self._logprobs(texts)

    def sleep(self) -> None:
        """Gives the memory back to training. ``ready`` -> ``asleep``."""
        self._expect("sleep", "ready")
        self._sleep()
        self.state, self._fresh = "asleep", False

    def wake(self) -> None:
        """Makes room for the weights again. ``asleep`` -> ``weights``."""
        self._expect("wake", "asleep")
        self._wake()
        self.state = "weights"

    def load_weights(self, weights: NamedTensors, version: int) -> None:
        """Takes the whole policy, its tensors named as in transformers' model. Needs ``weights``.

        ``version`` is the number of updates these weights have seen; samples carry it. A tensor needs to be valid only
        until the next one is taken. What then lies in the sampler is compared with what came: see ``receipt``.
        """
        self._expect("load_weights", "weights")
        self._fresh = False  # a load that fails half-way must not be started
        sent = Sent(weights, self._as_held)
        self._load_weights(sent)
        self.receipt = sent.receipt(version, self._held, self.unread, self._built)
        self.version, self._fresh = version, True

    def start(self) -> None:
        """Forgets what was cached under the old weights and becomes ready. ``weights`` -> ``ready``."""
        self._expect("start", "weights")
        if not self._fresh:
            raise WrongStateError("start() before load_weights(): the sampler woke up without its weights")
        self._start()
        self.state = "ready"

    def renew(self, weights: NamedTensors, version: int) -> None:
        """The whole hand-over, from ``ready`` or ``asleep`` to ``ready`` with these weights."""
        if self.state == "ready":
            self.sleep()
        self.wake()
        self.load_weights(weights, version)
        self.start()

    def _expect(self, call: str, state: State) -> None:
        if self.state != state:
            raise WrongStateError(f"{call}() needs the sampler in state '{state}', it is '{self.state}'")

    @abstractmethod
    def _generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]: ...

    @abstractmethod
    def _logprobs(self, texts: Sequence[Text]) -> list[np.ndarray]: ...

    @abstractmethod
    def _sleep(self) -> None: ...

    @abstractmethod
    def _wake(self) -> None: ...

    @abstractmethod
    def _load_weights(self, weights: NamedTensors) -> None: ...

    @abstractmethod
    def _start(self) -> None: ...

    def _as_held(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor with the numbers that the sampler is to hold, or None where they are not compared."""
        return None

    def _held(self) -> Held:
        """Digests of what the sampler holds now, of all tensors that ``_as_held`` gives."""
        return {}

    def close(self) -> None:  # noqa: B027  a sampler may have nothing to release
        """Releases what the process would not release by itself; before the process group ends."""
