"""How the micro-batches of an update run: one at a time, or together, layer by layer."""
