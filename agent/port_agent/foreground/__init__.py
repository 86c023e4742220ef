"""Training in the foreground: a worker as the agent starts it, followed by who asked until it ends. Torch-free."""
