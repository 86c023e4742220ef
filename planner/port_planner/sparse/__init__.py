"""Selects the tensors to train: measures their contribution, counts bytes, and chooses."""
