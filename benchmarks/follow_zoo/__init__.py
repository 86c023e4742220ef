"""Models, features and random programs that show whether a program under `exec` keeps plain PyTorch's bits."""
