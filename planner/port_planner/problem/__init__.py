"""The planning problem without a solver: its model, its replay, coarsening and reordering."""
