"""Operators in other pieces with the same bits: a step graph is rewritten, and stays one.

Each rewriting is a hypothesis about this machine's kernels; `comparison` runs it beside the original before it is used.
"""
