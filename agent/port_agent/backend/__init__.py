"""Where a step computes: memory, copies, events and random numbers of the CPU, of CUDA and of Apple's GPU.

Each is a `Backend` (`base`); `choose` returns the one for a kind of device. `raw_bytes` handles memory of any of them
as bytes; `staging` moves data between a device's memory and page files.
"""
