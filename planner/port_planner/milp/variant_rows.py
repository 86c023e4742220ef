"""Alternatives of groups of stages: one of them is chosen (eq11); the tensors of tiled
operators exist in tiles (eq12).
"""

from dataclasses import dataclass, field

import numpy as np

from port_planner.milp.columns import Columns, Term
from port_planner.problem.variants import undominated


@dataclass(frozen=True, slots=True)
class VariantLoads:
    """Bytes at one stage that depend on alternatives, more than the stage states (negative: fewer).

    Before its output exists, once it does, and then with the workspace.
    """

    before: list[Term] = field(default_factory=list)
    after: list[Term] = field(default_factory=list)
    working: list[Term] = field(default_factory=list)


def define_variants(f: Columns) -> None:
    """Create v[c, k] of every alternative that no other dominates, and of those in `include`.

    Also creates b[c, k, n] if a saving depends on gaps.
    """
    for c, group in enumerate(f.problem.groups):
        for k in sorted({*undominated(f.problem, group), *(k for known, k in f.known_variants if known == c)}):
            one = group.alternatives[k]
            f.variants[c, k] = f.model.column(f"v({c},{k})", f.joules(one.joules), integral=True)
            for n, saving in enumerate(one.savings):
                if not saving.gaps:
                    f.savings[c, k, n] = f.variants[c, k]
                elif all(g in f.gaps for g in saving.gaps):
                    f.savings[c, k, n] = f.model.column(f"b({c},{k},{n})")


def eq11_one_variant(f: Columns) -> None:
    """Sum of v[c, k] = 1 for every group."""
    for c in range(len(f.problem.groups)):
        terms = [(v, 1.0) for (group, _), v in f.variants.items() if group == c]
        f.model.row(f"eq11_one_variant({c})", terms, 1.0, 1.0)


def eq12_tiled(f: Columns) -> None:
    """Add b[c, k, n] <= v[c, k] and <= sum of x and y at the end of each of its gaps.

    So b is at most their product, and memory rows gain by making it large.
    """
    for (c, k, n), b in f.savings.items():
        if b == f.variants[c, k]:
            continue
        f.model.row(f"eq12_tiled({c},{k},{n})", [(b, 1.0), (f.variants[c, k], -1.0)], -np.inf, 0.0)
        for g in f.problem.groups[c].alternatives[k].savings[n].gaps:
            end, columns = f.problem.gaps[g].before, f.gaps[g]
            back = [v for s, v in columns.recompute.items() if s == end]
            back += [v for (s, _), v in columns.page.items() if s == end]
            terms = [(b, 1.0), *((v, -1.0) for v in back)]
            f.model.row(f"eq12_tiled({c},{k},{n},{g})", terms, -np.inf, 0.0)


def spared_terms(f: Columns) -> dict[tuple[int, int], list[Term]]:
    """Return, by tensor and stage, how many scaled bytes fewer the tensor takes there."""
    found: dict[tuple[int, int], list[Term]] = {}
    for (c, k, n), column in f.savings.items():
        saving = f.problem.groups[c].alternatives[k].savings[n]
        for s in saving.stages:
            found.setdefault((saving.tensor, s), []).append((column, saving.nbytes / f.byte_scale))
    return found


def variant_loads(f: Columns) -> list[VariantLoads]:
    """Return what alternatives add to and take from the bytes of each stage, scaled."""
    loads = [VariantLoads() for _ in f.problem.stages]
    for (c, k), v in f.variants.items():
        for change in f.problem.groups[c].alternatives[k].changes:
            held = (v, change.fixed_bytes / f.byte_scale)
            loads[change.stage].before.append(held)
            loads[change.stage].after.append(held)
            loads[change.stage].working.append((v, change.workspace_bytes / f.byte_scale))
    for (tensor, s), terms in spared_terms(f).items():
        less = [(column, -nbytes) for column, nbytes in terms]
        loads[s].after.extend(less)
        if s != f.problem.tensors[tensor].birth:
            loads[s].before.extend(less)
    return [VariantLoads(load.before, load.after, load.after + load.working) for load in loads]


def variant_seconds(f: Columns) -> list[list[Term]]:
    """Return what alternatives add to the compute seconds of each stage, scaled."""
    seconds: list[list[Term]] = [[] for _ in f.problem.stages]
    for (c, k), v in f.variants.items():
        for change in f.problem.groups[c].alternatives[k].changes:
            if change.seconds:
                seconds[change.stage].append((v, change.seconds / f.second_scale))
    return seconds
