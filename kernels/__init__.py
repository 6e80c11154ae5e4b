"""Losses over the vocabulary that never store the logits. See docs/kernels.md.

Importing this package imports nothing else: transformers looks for a top-level ``kernels`` and a run's
configuration must be checkable in well under a second. Names are resolved on first use (PEP 562).
"""

from importlib import import_module
from typing import Any

_HOME = {
    "PolicyLossOutput": "kernels.policy_loss",
    "PreferenceLossOutput": "kernels.preference_loss",
    "add_rms_norm": "kernels.norm",
    "gae": "kernels.advantages",
    "linear_kl": "kernels.divergence",
    "linear_logprob": "kernels.logprob",
    "linear_policy_loss": "kernels.policy_loss",
    "linear_preference_loss": "kernels.preference_loss",
    "reference": "kernels.reference",
}

__all__ = [
    "PolicyLossOutput",
    "PreferenceLossOutput",
    "add_rms_norm",
    "gae",
    "linear_kl",
    "linear_logprob",
    "linear_policy_loss",
    "linear_preference_loss",
    "reference",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kernels' has no attribute {name!r}")
    module = import_module(_HOME[name])
    value = module if _HOME[name] == f"kernels.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
