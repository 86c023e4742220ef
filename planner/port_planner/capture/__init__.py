"""From one real training step to a step graph."""
