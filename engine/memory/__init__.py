"""The memory plan: what lives on each GPU in each phase, predicted before anything loads, and measured in the run.

``planning`` makes the plan, ``meter`` measures; the others hold the sizes that a plan is made of.
"""
