"""Rollout batches: which prompts a step samples from, the responses, and what an algorithm is told of them.

``source`` draws batches, ``experience`` turns them into an algorithm's vectors.
"""
