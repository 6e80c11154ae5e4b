"""Who samples and who trains when: in turns, one batch ahead, on ranks of their own, with proved hand-overs, or nobody.

``base.Schedule`` is what the session sees, and ``engine.start`` makes the one that settings ask for: ``colocation``,
``overlapping``, ``split`` or ``rows``.
"""
