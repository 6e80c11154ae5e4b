"""The trainer: packed microbatches through DeepSpeed ZeRO, with the head's loss in the project's kernels.

Others import ``trainer``, ``held_out``, ``models``, ``weights``, ``export``, ``learning_rate`` and ``lora``; a reward
model also takes ``zero`` and ``packing`` for its forward passes.
"""
