"""Training in the foreground: a worker as the agent starts it, followed by its caller until it ends. Torch-free."""
