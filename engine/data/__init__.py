"""The rows of a user's data and the prompts that are made of them: files, chat templates, token ids.

``prompts`` gives what the rest of the engine takes; ``checks`` looks at the settings before anything is read.
"""
