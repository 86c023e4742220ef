"""The torch worker: a bundle's program executed inside its budget, paged, checkpointed."""
