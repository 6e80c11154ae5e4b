"""One file an algorithm: scores and log-probabilities in, advantages and a loss out. No state, no engine."""
