"""A schedule in a fraction of a second, without a solver.

Bytes per stage are in `load`, the decisions in `decisions` and `closures`, and the search steps in
`search_steps` and `search`.
"""
