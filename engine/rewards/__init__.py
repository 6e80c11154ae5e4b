"""What responses are worth: a Python function, a reward model, a server, or several of them with weights.

Others import the names below, ``answers`` to check what other functions of a user return, and ``classifier`` to tell a
reward model before its weights load.
"""

from engine.rewards.answers import RewardError
from engine.rewards.scorer import Scorer, Sources, load, means, read

__all__ = ["RewardError", "Scorer", "Sources", "load", "means", "read"]
