"""The trainer: packed microbatches through DeepSpeed ZeRO, with the head's loss in the project's kernels."""
