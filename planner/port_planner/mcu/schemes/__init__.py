"""Choose what a board trains: each layer's gain from training, the best sets within its
memory, and the best per joule.
"""
