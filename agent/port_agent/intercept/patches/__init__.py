"""Replacements for functions of torch and Python while a program runs under a budget, removed afterwards.

`program`: ends of steps, threads, refusals. `pointer_guards`: reads that bypass the dispatcher.
`lightning_saving` and `safetensors_saving`: checkpoints that are written in parts. `whole_nodes`: nodes of
autograd's graph that run without the mode.
"""
