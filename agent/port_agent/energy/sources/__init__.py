"""Power sources: one module per sensor, a common base, and a registry that chooses."""
