"""What happens before the first step: checks of the settings, inputs read, models loaded, trainer and sampler built.

Others import ``checks``, ``agreement`` (between nodes), ``preflight``, ``bootstrap`` (the embedded task's starting
model), ``prepared`` (a base model's copy with new tokens), ``loaded`` and ``build``.
"""
