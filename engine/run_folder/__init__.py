"""A run's folder: its place and its files, checkpoints that a run resumes from, and the summary.

Others import ``folder``, ``checkpoints``, ``in_flight`` and ``summary``.
"""
