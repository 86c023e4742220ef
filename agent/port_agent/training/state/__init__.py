"""What lasts from step to step: weights and optimizer state, where they begin, whether they are finite, and their commits."""
