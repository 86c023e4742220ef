"""Steps with tiled operators, where this machine's kernels give the bits of the whole."""
