"""A schedule in a fraction of a second, without a solver.

`load` per stage, `decisions` and `closures` behind them, `steps`, the `search`.
"""
