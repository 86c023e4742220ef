"""Run a whole program inside a budget, in the process that `port-agent exec` becomes.

Torch is loaded when the program imports it.
"""
