"""Rollout batches: which prompts a step samples from, the responses, and what an algorithm is told of them.

Others import ``source`` and ``row_source``, which draw batches, ``experience``, which turns them into an algorithm's
vectors, ``off_policy``, and ``sample_records``, what samples.jsonl has of them.
"""
