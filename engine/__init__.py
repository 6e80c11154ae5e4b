"""The engine: the loop and everything with state (configuration, data, generation, training, weights, checkpoints)."""
