"""Who samples and who trains when: in turns, one batch ahead, on ranks of their own, with proved hand-overs, or nobody.

``base.Schedule`` is what the session sees; ``engine.start.build`` makes the one that the settings ask for.
"""
