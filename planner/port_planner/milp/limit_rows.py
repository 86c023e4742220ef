"""The rows of the model that hold the step to its deadline and flash to its wear: eq8 and eq9."""

import numpy as np

from port_planner.milp.columns import Columns
from port_planner.milp.variant_rows import variant_seconds


def eq8_deadline(f: Columns) -> None:
    """Recompute, packing and stall seconds, and those of alternatives, must fit between the step's
    own time and the deadline.
    """
    problem = f.problem
    if problem.deadline_s is None:
        return
    share = f.breadth.optimistic
    terms = [
        (v, rematerialization.seconds * (rematerialization.own_share if share else 1.0) / f.second_scale)
        for _, _, rematerialization, v in f.rematerialization_columns()
    ]
    for g, columns in f.gaps.items():
        packing = problem.tensors[problem.gaps[g].tensor].packing(problem.gaps[g].version)
        if packing is not None:
            terms += [(v, packing.seconds / f.second_scale) for v in columns.packing()]
    terms += [(v, 1.0) for v in f.stalls.values()]
    terms += [term for terms_of in variant_seconds(f) for term in terms_of]
    slack = (problem.deadline_s - problem.base_seconds) / f.second_scale
    f.model.row("eq8_deadline", terms, -np.inf, slack if slack < -1e-9 else max(slack, 0.0))


def eq9_wear(f: Columns) -> None:
    """Bytes written to flash per step must stay within the limit."""
    limit = f.problem.write_limit_bytes
    if limit is None:
        return
    terms = [
        (v, f.problem.tensors[i].nbytes / f.byte_scale)
        for (i, _, target), v in f.page_out.items()
        if f.problem.limit_bytes(target) is None
    ]
    for g, columns in f.gaps.items():
        packing = f.problem.tensors[f.problem.gaps[g].tensor].packing(f.problem.gaps[g].version)
        if packing is not None:
            terms += [(v, packing.packed_bytes / f.byte_scale) for v in columns.packed_page.values()]
    f.model.row("eq9_wear", terms, -np.inf, limit / f.byte_scale)
