"""The torch worker: executes a bundle's program inside its budget, with paging and checkpoints."""
