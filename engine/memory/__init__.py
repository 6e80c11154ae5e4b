"""The memory plan: what lives on each GPU in each phase, predicted before anything loads, and measured in the run.

``planning`` makes the plan from the ``arrangements`` that may be chosen, ``meter`` measures. The sizes that a plan is
made of, in bytes: ``training_bytes``, ``sampler_bytes``, ``kv_cache``, of a model of a ``model_shape``.
"""
