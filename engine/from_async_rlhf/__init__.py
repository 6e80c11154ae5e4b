"""Commands of async_rlhf in Tandem's settings: ``python -m engine.from_async_rlhf``.

``command_line`` is for ``__main__`` and tests; ``translation`` has the scripts that train on samples, ``pipeline`` the
others, ``keys`` and ``pipeline_keys`` list what each option became.
"""
