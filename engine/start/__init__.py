"""What happens before the first step: checks of the settings, inputs read, models loaded, trainer and sampler built.

Others import ``checks``, ``preflight``, ``loaded`` and ``build``, which follow one another in this order.
"""
