"""Run a whole program inside a budget: the process that `port-agent exec` turns into.

Torch is loaded when the program imports it.
"""
