"""Weights that no step writes: where they lie, and in which form."""
