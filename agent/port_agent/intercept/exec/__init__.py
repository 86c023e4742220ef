"""Run a whole program inside a budget: what `port-agent exec` becomes.

Torch is loaded when the program imports it.
"""
