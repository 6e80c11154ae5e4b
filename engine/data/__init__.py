"""The rows of a user's data, and the prompts or sequences to train on that are made of them.

Others import ``prompts``, ``training_rows``, ``stream`` and ``end_of_sequence``, ``row_files`` and ``file_formats`` for
rows as they stand, ``policy_tokens`` for the policy's tokenizer, ``padding`` for reward models, ``templates`` for
messages, and ``checks``, which looks at the settings before anything is read.
"""
