"""The rows of a user's data and the prompts that are made of them: files, chat templates, token ids.

Others import ``prompts`` and ``end_of_sequence``, ``templates`` for messages, and ``checks``, which looks at the
settings before anything is read.
"""
