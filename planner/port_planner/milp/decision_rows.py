"""The rows of the model that say what may happen to a gap: eq1 to eq4."""

from collections import defaultdict

import numpy as np

from port_planner.milp.columns import Columns


def eq1_one_decision(f: Columns) -> None:
    """k + sum of x + sum of y + q + sum of p = 1 for every gap."""
    for g, columns in f.gaps.items():
        terms = [(columns.keep, 1.0)]
        terms += [(v, 1.0) for v in columns.recompute.values()]
        terms += [(v, 1.0) for v in columns.page.values()]
        terms += [(v, 1.0) for v in columns.packing()]
        f.model.row(f"eq1_one_decision({g})", terms, 1.0, 1.0)


def eq2_presence(f: Columns) -> None:
    """a[g,s] = a[g,s-1] + x[g,s] + y[g,s]: once back, a tensor stays until its next use."""
    for g, columns in f.gaps.items():
        previous = columns.keep
        returns: dict[int, list[int]] = defaultdict(list)
        for s, v in columns.recompute.items():
            returns[s].append(v)
        for (s, _), v in columns.page.items():
            returns[s].append(v)
        for s in range(columns.low, f.problem.gaps[g].before):
            if returns[s]:
                present = f.model.column(f"a({g},{s})")
                terms = [(present, 1.0), (previous, -1.0), *((v, -1.0) for v in returns[s])]
                f.model.row(f"eq2_presence({g},{s})", terms, 0.0, 0.0)
                previous = present
            columns.presence[s] = previous


def eq3_inputs(f: Columns) -> None:
    """A rematerialization at stage s needs each input there: x or c <= a[u,s] + c[u,s]."""
    for _, s, rematerialization, v in f.rematerialization_columns():
        for u, version in rematerialization.inputs:
            terms = f.presence(u, version, s)
            if terms is not None:
                f.model.row(
                    f"eq3_inputs({f.model.names[v]},{u})", [(v, 1.0), *((c, -a) for c, a in terms)], -np.inf, 0.0
                )


def eq4_page_out(f: Columns) -> None:
    """o[i,v,d] >= sum of the page-ins of each gap.

    Contents are written once and read as often as needed. Those that live within the step are written again for each
    gap if the target is memory.
    """
    model = f.model
    for g, columns in f.gaps.items():
        gap = f.problem.gaps[g]
        tensor = f.problem.tensors[gap.tensor]
        clean = tensor.persistent and not tensor.writes
        for paging in tensor.paging:
            if clean:
                continue
            reads = [v for (_, target), v in columns.page.items() if target == paging.target]
            if not reads:
                continue
            key = f.page_out_key(g, paging.target)
            if key not in f.page_out:
                f.page_out[key] = model.column(f"o({key[0]},{key[1]},{key[2]})", f.joules(paging.joules_out))
            terms = [(f.page_out[key], -1.0), *((v, 1.0) for v in reads)]
            model.row(f"eq4_page_out({g},{paging.target})", terms, -np.inf, 0.0)
