"""Models, features and random programs that show whether a followed program keeps plain PyTorch's bits."""
