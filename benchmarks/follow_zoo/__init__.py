"""What shows that a followed program keeps plain PyTorch's bits: models, features, random programs."""
