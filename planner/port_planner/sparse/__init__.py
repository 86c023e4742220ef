"""Which tensors to train at all: contribution probed, bytes counted, a choice made."""
