"""A quantized base: linear layers whose frozen weights are codes and scales, and the file that stores them."""
