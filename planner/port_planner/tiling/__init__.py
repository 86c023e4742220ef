"""Tiling of operators with identical bits: rewrites a step graph into another step graph.

Each rewriting is a hypothesis about this machine's kernels; `comparison` compares it with the original before it is
used.
"""
