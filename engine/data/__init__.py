"""The rows of a user's data, and the prompts or sequences to train on that are made of them.

Others import ``prompts``, ``training_rows``, ``stream``, ``policy_tokens`` (the policy's tokenizer) and
``end_of_sequence``, ``templates`` for messages, and ``checks``, which looks at the settings before anything is read.
"""
