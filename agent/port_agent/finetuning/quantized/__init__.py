"""A base on a grid: linear layers whose frozen weights are codes and scales, and the file that keeps them."""
