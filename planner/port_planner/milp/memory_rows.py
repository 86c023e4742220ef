"""The memory rows of the model: bytes before and after each stage, in-stage order, sliced updates."""

from collections import defaultdict

import numpy as np

from port_planner.milp.columns import Columns, GapColumns, Term, kept_bytes
from port_planner.milp.held_bytes import HeldBytes, HeldRows
from port_planner.milp.highs import Vector
from port_planner.milp.time_rows import add_overlap_loads
from port_planner.milp.variant_rows import spared_terms, variant_loads
from port_planner.problem.problem import Gap, Rematerialization, Semantics
from port_planner.problem.replay import gaps_around, page_out_ready, read_window, write_window


def eq5_eq6_memory(f: Columns) -> None:
    """Bytes before and after a stage's output exists, both within the budget; before it, intermediates count too."""
    problem = f.problem
    fixed, born, work = _fixed_loads(f)
    held = _gap_loads(f)
    packing, unpacking = _packing_loads(f)
    variants = variant_loads(f)
    intermediates: list[list[Term]] = [[] for _ in range(problem.size)]
    for (i, s), v in f.intermediates.items():
        intermediates[s].append((v, problem.tensors[i].nbytes / f.byte_scale))
    workspaces = {
        s for _, s, rematerialization, _ in f.rematerialization_columns() if rematerialization.workspace_bytes
    }
    work_before = _rematerialization_workspaces(f)
    limit = (problem.ram_bytes or 0) / f.byte_scale
    rows = HeldRows(f.model, f.byte_scale, limit)
    for s in range(problem.size):
        rows.advance(held.changes(s))
        after = fixed[s] + work[s]
        sliced_after, sliced_before = _slice_terms(f, s)
        working = sliced_after + variants[s].working
        if f.breadth.optimistic:
            least = after - problem.stages[s].overcount_bytes / f.byte_scale
            rows.offer(f"eq6_memory_after({s})", working, least)
            continue
        rows.offer(f"eq6_memory_after({s})", working, after)
        before = fixed[s] - born[s]
        if packing[s]:
            rows.offer(f"eq6_packing({s})", packing[s] + sliced_after + variants[s].after, fixed[s])
        at_start = sliced_before + variants[s].before
        if f.breadth.exact_stages and (intermediates[s] or s in workspaces):
            eq5_in_stage(f, s, [*rows.held, *at_start], before, limit)
            intermediates[s] = []
        extra = unpacking[s] + intermediates[s] + ([(work_before[s], 1.0)] if s in work_before else [])
        if extra or before > after:
            rows.offer(f"eq5_memory_before({s})", at_start + extra, before)
    rows.write()


def eq6_target_memory(f: Columns) -> None:
    """Bytes of the pages in a target that is memory must fit its capacity.

    A page takes space from the stage at whose end its tensor leaves until it is back; a persistent
    tensor's copy, in all stages.
    """
    problem = f.problem
    held: dict[tuple[int, int], list[Term]] = defaultdict(list)
    for g, columns in f.gaps.items():
        gap, tensor = problem.gaps[g], problem.tensors[problem.gaps[g].tensor]
        for (s, target), v in columns.page.items():
            if problem.limit_bytes(target) is not None and not tensor.persistent:
                for t in {t % problem.size for t in range(gap.after, s)}:
                    held[target, t].append((v, tensor.nbytes / f.byte_scale))
    copies = eq6_copies(f)
    for target, t in sorted({*held, *((target, 0) for target in copies)}):
        limit = (problem.limit_bytes(target) or 0) / f.byte_scale
        total, most = copies.get(target, (None, 0.0))
        terms = held[target, t] + ([] if total is None else [(total, 1.0)])
        if sum(nbytes for _, nbytes in held[target, t]) + most > limit:
            f.model.row(f"eq6_target_memory({t},{target})", terms, -np.inf, limit)


def eq6_copies(f: Columns) -> dict[int, tuple[int, float]]:
    """copies[d] >= sum of m n[i,d]; n[i,d] >= sum of the page-ins of each gap of i from d, <= 1 - those from elsewhere.

    For persistent tensors and targets that are memory. Returns, by target, the column with the bytes of all copies
    there, and their maximum.
    """
    problem = f.problem
    gaps_of: dict[int, list[int]] = defaultdict(list)
    for g, columns in f.gaps.items():
        if problem.tensors[problem.gaps[g].tensor].persistent and columns.page:
            gaps_of[problem.gaps[g].tensor].append(g)
    held: dict[int, list[Term]] = defaultdict(list)
    for i, gaps in gaps_of.items():
        for target in sorted({d for g in gaps for _, d in f.gaps[g].page if problem.limit_bytes(d) is not None}):
            copy = f.model.column(f"n({i},{target})")
            held[target].append((copy, problem.tensors[i].nbytes / f.byte_scale))
            for g in gaps:
                pages = f.gaps[g].page.items()
                here = [(v, -1.0) for (_, d), v in pages if d == target]
                elsewhere = [(v, 1.0) for (_, d), v in pages if d != target]
                f.model.row(f"eq6_has_copy({g},{target})", [(copy, 1.0), *here], 0.0, np.inf)
                f.model.row(f"eq6_one_home({g},{target})", [(copy, 1.0), *elsewhere], -np.inf, 1.0)
    found: dict[int, tuple[int, float]] = {}
    for target, terms in sorted(held.items()):
        total = f.model.column(f"copies({target})", upper=np.inf)
        f.model.row(f"eq6_copies({target})", [(total, 1.0), *((v, -a) for v, a in terms)], 0.0, np.inf)
        found[target] = total, sum(a for _, a in terms)
    return found


def _rematerialization_workspaces(f: Columns) -> dict[int, int]:
    """Create a column per stage that is at least the workspace of each rematerialization chosen there."""
    found: dict[int, int] = {}
    if f.breadth.exact_stages:
        return found
    for _, s, rematerialization, v in f.rematerialization_columns():
        if rematerialization.workspace_bytes > 0:
            if s not in found:
                found[s] = f.model.column(f"work({s})", upper=np.inf)
            terms = [(found[s], 1.0), (v, -rematerialization.workspace_bytes / f.byte_scale)]
            f.model.row(f"eq5_workspace({f.model.names[v]})", terms, 0.0, np.inf)
    return found


def eq5_in_stage(f: Columns, stage: int, base: list[Term], fixed: float, limit: float) -> None:
    """Bound the bytes after each rematerialization of a stage, when later ones do not exist yet and used intermediates
    are freed.

    l[q,j] >= c[q] + v[k] - 1: intermediate q is alive at position j while any later rematerialization k reads it.
    """
    todo = _stage_rematerializations(f, stage)
    names, late = f.model.names, _saved_later(f, stage, todo)
    place = {i: j for j, (i, _, _) in enumerate(todo)}
    readers: list[list[int]] = [[] for _ in todo]
    for j, (_, rematerialization, _) in enumerate(todo):
        for u, _ in rematerialization.inputs:
            if u in place:
                readers[place[u]].append(j)
    for j, (_, rematerialization, column) in enumerate(todo):
        row = [*base, (column, rematerialization.workspace_bytes / f.byte_scale)]
        for q, (u, _, other) in enumerate(todo):
            nbytes = f.problem.tensors[u].nbytes / f.byte_scale
            if f.intermediates.get((u, stage)) != other:
                if q > j:
                    row += [(other, -nbytes), *late.get(other, [])]
            elif q == j:
                row.append((other, nbytes))
            elif q < j and (later := [k for k in readers[q] if k >= j]):
                alive = f.model.column(f"l({names[other]},{names[column]})")
                row.append((alive, nbytes))
                for k in later:
                    terms = [(alive, 1.0), (other, -1.0), (todo[k][2], -1.0)]
                    f.model.row(f"eq5_alive({names[other]},{names[column]},{names[todo[k][2]]})", terms, -1.0, np.inf)
        f.model.row(f"eq5_in_stage({names[column]})", row, -np.inf, limit - fixed)


def _saved_later(f: Columns, stage: int, todo: list[tuple[int, Rematerialization, int]]) -> dict[int, list[Term]]:
    """Create e[r,b] >= r + b - 1: what b saves of a tensor that r rematerializes, which must not be
    deducted before r has run.
    """
    saved, found = spared_terms(f), dict[int, list[Term]]()
    for i, _, column in todo:
        for b, nbytes in saved.get((i, stage), []) if f.intermediates.get((i, stage)) != column else ():
            names = f"{f.model.names[column]},{f.model.names[b]}"
            both = f.model.column(f"e({names})")
            f.model.row(f"eq5_later({names})", [(both, 1.0), (column, -1.0), (b, -1.0)], -1.0, np.inf)
            found.setdefault(column, []).append((both, nbytes))
    return found


def _stage_rematerializations(f: Columns, stage: int) -> list[tuple[int, Rematerialization, int]]:
    """Return (tensor, rematerialization, column) of all that may be rematerialized at `stage`, in order of computation.

    A tensor that may both be an intermediate and come back appears twice: only one of the two is ever chosen.
    """
    order: list[tuple[int, int, Rematerialization, int]] = []
    for i, s, rematerialization, v in f.rematerialization_columns():
        if s == stage:
            writes = f.problem.tensors[i].writes
            version = next(k for k, r in enumerate(f.problem.tensors[i].rematerializations) if r is rematerialization)
            order.append((writes[version], i, rematerialization, v))
    return [
        (i, rematerialization, v)
        for _, i, rematerialization, v in sorted(order, key=lambda entry: (entry[0], entry[1], entry[3]))
    ]


def _fixed_loads(f: Columns) -> tuple[Vector, Vector, Vector]:
    """Return scaled bytes per stage: those held in any case, the part of them created there, and workspace."""
    problem, size = f.problem, f.problem.size
    fixed, born = np.zeros(size), np.zeros(size)
    for tensor in problem.tensors:
        fixed[list(tensor.accesses)] += tensor.nbytes
        if tensor.birth >= 0:
            born[tensor.birth] += tensor.nbytes
    fixed += kept_bytes(problem, f.fixed_gaps)
    fixed += [stage.fixed_bytes for stage in problem.stages]
    work = np.array([stage.workspace_bytes for stage in problem.stages], dtype=float)
    return fixed / f.byte_scale, born / f.byte_scale, work / f.byte_scale


def _gap_loads(f: Columns) -> HeldBytes:
    """Return the bytes that decisions hold in each stage: kept, back early, packed, landing, being written."""
    problem, held = f.problem, HeldBytes(f.problem.size)
    for g, columns in f.gaps.items():
        gap, tensor = problem.gaps[g], problem.tensors[problem.gaps[g].tensor]
        packing = tensor.packing(gap.version)
        first, column = gap.after + 1, columns.keep
        for s, present in columns.presence.items():
            if present != column:
                held.add(column, tensor.nbytes, first, s)
                first, column = s, present
        held.add(column, tensor.nbytes, first, gap.before)
        if columns.packed is not None and packing is not None:
            held.add(columns.packed, packing.packed_bytes, gap.after + 1, gap.before)
        _add_transfer_loads(f, gap, columns, held)
        add_overlap_loads(f, gap, columns, held)
        _add_stored_loads(f, gap, columns, held)
    return held


def _packing_loads(f: Columns) -> tuple[list[list[Term]], list[list[Term]]]:
    """Return, per stage, the bytes of packed forms besides their tensors: packed after it, and unpacked before it."""
    size = f.problem.size
    packing: list[list[Term]] = [[] for _ in range(size)]
    unpacking: list[list[Term]] = [[] for _ in range(size)]
    for g, columns in f.gaps.items():
        gap = f.problem.gaps[g]
        cost = f.problem.tensors[gap.tensor].packing(gap.version)
        if cost is not None:
            terms = [(v, cost.packed_bytes / f.byte_scale) for v in columns.packing()]
            packing[gap.after] += terms
            unpacking[gap.before % size] += terms
    return packing, unpacking


def _add_stored_loads(f: Columns, gap: Gap, columns: GapColumns, held: HeldBytes) -> None:
    """A page in zram stays in RAM, smaller, until it is read."""
    for paging in f.problem.tensors[gap.tensor].paging:
        for (s, target), v in columns.page.items():
            if target == paging.target:
                held.add(v, paging.stored_bytes, gap.after + 1, s)


def _add_transfer_loads(f: Columns, gap: Gap, columns: GapColumns, held: HeldBytes) -> None:
    problem, tensor = f.problem, f.problem.tensors[gap.tensor]
    packing = tensor.packing(gap.version)
    packed_bytes = 0 if packing is None else packing.packed_bytes
    if page_out_ready(problem, gap, None) > gap.after + 2:
        for v in columns.page.values():
            held.add(v, tensor.nbytes, gap.after + 1, gap.after + 2)
        for v in columns.packed_page.values():
            held.add(v, packed_bytes, gap.after + 1, gap.after + 2)
    if problem.semantics is not Semantics.REAL:
        return
    for paging in tensor.paging:
        for (s, target), v in columns.page.items():
            if target == paging.target:
                reads = read_window(problem, gap, s, paging.seconds_in)
                for t, _ in (*reads, *write_window(problem, gap, paging.seconds_out)):
                    held.add(v, tensor.nbytes, t, t + 1)
    for paging in packing.paging if packing is not None else ():
        if paging.target in columns.packed_page:
            v, reads = columns.packed_page[paging.target], read_window(problem, gap, gap.before, paging.seconds_in)
            for t, _ in (*reads, *write_window(problem, gap, paging.seconds_out)):
                held.add(v, packed_bytes, t, t + 1)


def define_slices(f: Columns) -> None:
    """Create z[k]: update k runs slice by slice."""
    for k, slicing in enumerate(f.problem.slicings):
        sides = [gaps_around(f.problem, i, slicing.stage) for i in slicing.members]
        if all(g in f.gaps and f.gaps[g].page for pair in sides for g in pair) and all(sides):
            f.slices[k] = f.model.column(f"z({k})", integral=True)


def _slice_terms(f: Columns, stage: int) -> tuple[list[Term], list[Term]]:
    after: list[Term] = []
    before: list[Term] = []
    for k, v in f.slices.items():
        slicing = f.problem.slicings[k]
        if slicing.stage == stage:
            members = sum(f.problem.tensors[i].nbytes for i in slicing.members)
            spared = members + slicing.saved_bytes - slicing.buffer_bytes
            if f.breadth.optimistic:
                spared += slicing.other_bytes
            after.append((v, -spared / f.byte_scale))
            before.append((v, -members / f.byte_scale))
    return after, before


def eq10_slices(f: Columns) -> None:
    """z[k] <= y at the end of the gap before the update, and of the gap after it, for all it streams."""
    for k, v in f.slices.items():
        slicing = f.problem.slicings[k]
        for i in slicing.members:
            for g in gaps_around(f.problem, i, slicing.stage):
                columns = f.gaps[g]
                end = f.problem.gaps[g].before
                terms = [(v, 1.0)] + [(y, -1.0) for (s, _), y in columns.page.items() if s == end]
                f.model.row(f"eq10_slices({k},{g})", terms, -np.inf, 0.0)
                hidden = columns.read_ahead if end % f.problem.size == slicing.stage else columns.write_behind
                for target, h in hidden.items():
                    f.model.row(f"eq10_exposed({k},{g},{target})", [(v, 1.0), (h, 1.0)], -np.inf, 1.0)
