"""The file that carries a step to a device: manifest, tensors and data order."""
