"""Commands of async_rlhf in Tandem's settings: ``python -m engine.from_async_rlhf``.

``translation.main`` is for ``__main__`` and tests; ``keys`` lists what each option became.
"""
