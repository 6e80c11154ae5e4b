"""Who samples and who trains when: in turns, one batch ahead, or on ranks of their own, with proved hand-overs.

Others import ``base``, which is what the session sees; only ``engine.start`` makes one of ``colocation``,
``overlapping`` or ``split``, whose other side the loop and the session start.
"""
