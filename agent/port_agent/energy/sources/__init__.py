"""Where joules come from: one module per sensor, a base they share, a registry that picks."""
