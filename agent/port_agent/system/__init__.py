"""The operating system's side: control groups, locks, clocks, atomic files, kernel events."""

VERSION = "0.2.0"
"""Version of this project and its distribution.

A constant, because `importlib.metadata`, which could report it, takes 2 MB of a long-lived process.
"""
