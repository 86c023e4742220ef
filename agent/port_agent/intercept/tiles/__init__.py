"""Operators that run a part at a time, with the bits of the whole, if the whole does not fit.

`lists` runs operators over lists element by element. `elementwise` tiles operators that compute each element, or each
row, alone, and those that only move elements (`element_copies`). `rows` and `products` read from files in place,
products only if `port_planner.exactness` knows that they have the bits of the whole.
"""
