"""The rows of a user's data, and the prompts or sequences to train on that are made of them.

Others import ``prompts``, ``training_rows``, ``stream`` and ``end_of_sequence``, ``row_files`` for rows as they stand,
``templates`` for messages, ``padding`` for reward models, and ``checks``, which looks at the settings before anything
is read.
"""
