"""Steps with tiled operators, for those where this machine's kernels give the bits of the whole."""
