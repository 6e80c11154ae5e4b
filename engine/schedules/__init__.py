"""Who samples and who trains when: in turns, one batch ahead, or on ranks of their own, with proved hand-overs.

``base.Turns`` is what the session sees; ``engine.start`` chooses one.
"""
