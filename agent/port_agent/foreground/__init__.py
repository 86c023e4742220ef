"""Training in the foreground: a worker started as by the agent, which its caller follows until it ends.

Does not import torch.
"""
