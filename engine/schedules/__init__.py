"""Who samples and who trains when: in turns, one batch ahead, on ranks of their own, with proved hand-overs, or nobody.

Others import ``base``, which is what the session sees; only ``engine.start`` makes one of ``colocation``,
``overlapping``, ``split`` (whose other side the loop and the session start) or ``rows``.
"""
