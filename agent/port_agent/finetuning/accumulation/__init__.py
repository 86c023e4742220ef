"""How the micro-batches of an update run: one by one, or together, layer by layer."""
