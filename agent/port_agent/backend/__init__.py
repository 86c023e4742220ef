"""Where a step computes: memory, copies, events and random numbers of the CPU, of CUDA and of Apple's GPU.

Each is a `Backend` (`base`); `choose` gives the one of a kind. `raw_bytes` are bytes of any of them, `staging` is the way
between a device's memory and page files.
"""
