"""Boards: which there are, their firmware images, how they are flashed or simulated."""
