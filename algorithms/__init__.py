"""One file an algorithm: its record, its settings, and scores and log-probabilities in, an objective out. No engine.

``algorithms.base`` is what one derives from, ``algorithms.registry`` lists those that are built in; neither imports
torch. What objectives are computed with is in ``rollout``, ``advantages``, ``value`` and ``normalise``.
"""
