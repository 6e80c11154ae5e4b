"""What responses are worth: a Python function, a reward model, a server, or several of them with weights.

Others import the names below, and ``answers`` to check what other functions of a user return.
"""

from engine.rewards.answers import RewardError
from engine.rewards.scorer import Scorer, Sources, load, means, read

__all__ = ["RewardError", "Scorer", "Sources", "load", "means", "read"]
