"""Operators that do not fit whole, run one part at a time with the bits of the whole.

`lists` runs operators over lists element by element. `elementwise` tiles operators that compute each element or each
row independently, and those that only move elements (`element_copies`). `rows` and `products` read from files in place,
products only if `port_planner.exactness` knows that they have the bits of the whole.
"""
