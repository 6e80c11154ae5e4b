"""Embedded tasks: prompts, verifier, tokenizer and a starting checkpoint, with nothing to download.

Every module is for everybody.
"""
