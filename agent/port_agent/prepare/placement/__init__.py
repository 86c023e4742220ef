"""Operators of a step divided among devices: what each takes there, where each runs, and the numbers that this must give."""
