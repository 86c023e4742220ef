"""Operators that run a part at a time, with the bits of the whole, where the whole has no room.

`lists` runs operators over lists element by element; `piecewise` cuts what computes each element, or each row, alone, and what only moves elements (`moves`); `rows` and
`products` read from files where they lie, products only where `port_planner.exactness` knows that they have the bits of the whole.
"""
