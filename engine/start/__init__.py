"""What happens before the first step: checks of the settings, inputs read, models loaded, trainer and sampler built.

Others import ``checks``, ``preflight``, ``bootstrap`` (the embedded task's starting model), ``loaded`` and ``build``.
"""
