"""Basics without graphs, plans or devices: errors, units, times, bounds, the user's cache, process memory, and I/O
that bypasses the page cache.
"""
