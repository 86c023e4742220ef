"""`plan`, `show`, `train`: from a training script to trained weights, in the foreground."""
