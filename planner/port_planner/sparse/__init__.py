"""Selects which tensors to train: probes their contribution, counts bytes, and chooses."""
