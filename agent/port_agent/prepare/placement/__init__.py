"""Dividing a step's operators among devices: their costs on each, their places, and the expected results."""
