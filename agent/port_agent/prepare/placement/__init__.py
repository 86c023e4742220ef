"""Dividing a step's operators among devices: their costs on each, their places, and the numbers that this must give."""
