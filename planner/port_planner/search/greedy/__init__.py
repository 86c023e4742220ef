"""A schedule in a fraction of a second, without a solver.

Bytes per stage are in `load`, the decisions in `decisions` and `closures`, and the moves in `search_steps` and `search`.
"""
