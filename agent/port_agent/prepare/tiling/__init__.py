"""Steps with operators in pieces, where this machine's kernels give the bits of the whole."""
