"""The memory plan: what lives on each GPU in each phase, predicted before anything loads, and measured in the run.

Others import ``planning``, which makes the plan from the ``arrangements`` that may be chosen, ``meter``, which
measures, and for sizes ``units``, ``training_bytes`` and ``model_shape``.
"""
