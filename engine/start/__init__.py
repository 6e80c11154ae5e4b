"""What happens before the first step: checks of the settings, inputs read, models loaded, trainer and sampler built.

``checks``, ``preflight`` and ``build`` follow one another in this order.
"""
