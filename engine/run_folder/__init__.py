"""A run's folder: its place and its files, checkpoints that a run resumes from, and the summary.

``folder`` and ``checkpoints`` are for everybody.
"""
