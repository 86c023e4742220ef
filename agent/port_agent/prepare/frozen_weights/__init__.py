"""Weights that no step writes: where they are stored, and in which form."""
