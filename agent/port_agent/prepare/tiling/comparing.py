"""Compare rewritten operators with the originals first, in a separate process with the bundle's number of threads.

Operators that differ stay whole and are named; then the costs of the result are measured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from port_agent.prepare.measurement.progress import Progress
from port_agent.prepare.tiling.tiled_job import ComparisonLimits, TiledJob
from port_planner.exactness.kept_answers import AnswerFile, answer_key
from port_planner.exactness.replacements import Difference
from port_planner.ir.costs import OpCost
from port_planner.ir.device_kinds import CPU
from port_planner.ir.graph import GraphError, StepGraph
from port_planner.ir.operands.verify import verify_operands
from port_planner.make_bundle import CapturedJob
from port_planner.profiling.operator_profile import MeasuredCosts
from port_planner.tiling.rewriting import Replacement, RewrittenGraph, form_of
from port_planner.tiling.tilings import Tiling

_COMPARED = 0.5
"""Progress of the stage once the tiles' costs are known; quick plans with them take the rest."""

_SPLITS = 3
"""Number of times that chains are split at operators whose tiles give different bits; what
still differs stays whole.
"""

_Found: TypeAlias = tuple[str, int | None] | None
"""The stored result of a comparison: where the results differ, and which operator's differ; None if they are equal."""


def rewritten_alike(
    captured: CapturedJob, rewrite: Callable[[StepGraph, frozenset[int]], RewrittenGraph], allowed: ComparisonLimits
) -> tuple[dict[str, StepGraph], list[str]]:
    """Return a job's graphs, rewritten except where that gives different bits here, and these exceptions."""
    graphs, left = dict(captured.graphs), list[str]()
    job = {
        name: rewrite(graph, frozenset()) for name, graph in graphs.items() if graph.device == CPU
    }  # kernels known here
    for (name, new), found in zip(job.items(), compared(pairs_of(captured, job), allowed), strict=True):
        left += [f"{d.replacement.what}: {d.where}" for d in found]
        odd = frozenset(i for d in found for i in d.replacement.old)
        graphs[name] = rewrite(captured.graphs[name], odd).graph if odd else new.graph
    return graphs, left


def tiled_with(
    base: TiledJob,
    candidates: Sequence[Mapping[str, Tiling]],
    allowed: ComparisonLimits,
    compute_watts: float,
    progress: Progress,
) -> list[TiledJob]:
    """Return a job with these graphs, whole in `base`, cut in each of these ways without what differs here. All are
    compared and measured at once.

    Raises DryRunError where a process that compares or measures fails.
    """
    captured, made = base.captured, []
    for candidate, rewritten, odd in _without_differing(captured, candidates, allowed):
        graphs, left, what = dict(captured.graphs), [*base.left_whole, *odd], [*base.tiled_chains]
        tilings, untiled = dict(base.tilings), dict(base.untiled)
        for name, new in rewritten.items():
            try:
                verify_operands(new.graph)
            except GraphError as error:  # tiles of an operator whose check is only known as a whole
                left.append(str(error).partition(";")[0])
                continue
            if new.replacements:
                graphs[name], tilings[name], untiled[name] = new.graph, candidate[name], captured.graphs[name]
                what += [r.what for r in new.replacements]
        made.append(
            TiledJob(replace(captured, graphs=graphs), base.measured, tuple(left), tuple(what), tilings, untiled)
        )
    known = {id(graph): ops for graph, ops in zip(captured.graphs.values(), base.measured.ops, strict=True)}
    return with_operator_costs(made, allowed, compute_watts, progress, known)


def _without_differing(
    captured: CapturedJob, candidates: Sequence[Mapping[str, Tiling]], allowed: ComparisonLimits
) -> list[tuple[dict[str, Tiling], dict[str, RewrittenGraph], list[str]]]:
    """Return each of these candidates without what gives different bits here, their graphs, and what was left out.

    A chain is split at a differing operator, so that its neighbours may still be tiled; it stays whole if that does not
    help.
    """
    whole = captured.graphs
    found = [
        (dict(candidate), {name: tiling.applied(whole[name]) for name, tiling in candidate.items()}, list[str]())
        for candidate in candidates
    ]
    for splits in range(_SPLITS, -1, -1):
        differing = compared([pair for _, new, _ in found for pair in pairs_of(captured, new)], allowed)
        if not any(differing):
            break
        of_each = iter(differing)
        for candidate, new, names in found:
            for name, tiling in candidate.items():
                odd = next(of_each)
                for one in odd:
                    names.append(f"{one.replacement.what}: {one.where}")
                    if splits and one.op is not None:
                        tiling = tiling.split(whole[name], one.op)
                    else:
                        tiling = tiling.changed(one.replacement.old, 1)
                if odd:
                    candidate[name], new[name] = tiling, tiling.applied(whole[name])
    return found


def with_operator_costs(
    made: list[TiledJob],
    allowed: ComparisonLimits,
    compute_watts: float,
    progress: Progress,
    known: Mapping[int, tuple[OpCost, ...]] = {},
) -> list[TiledJob]:
    """Return the same with the costs of their operators.

    `known`: of graphs that are measured already, by their `id`.
    """
    graphs = [graph for tiled in made for graph in tiled.captured.graphs.values() if id(graph) not in known]
    if not graphs:
        return made
    ops = iter(allowed.measurer.measure(graphs, allowed.threads, compute_watts, progress, resident=False).ops)
    progress("compare", _COMPARED)
    tables = [[known.get(id(g)) or next(ops) for g in tiled.captured.graphs.values()] for tiled in made]
    return [replace(s, measured=replace(s.measured, ops=tuple(of_it))) for s, of_it in zip(made, tables, strict=True)]


def pairs_of(captured: CapturedJob, rewritten: Mapping[str, RewrittenGraph]) -> list[tuple[StepGraph, RewrittenGraph]]:
    """Return each rewritten graph after its original."""
    return [(captured.graphs[name], new) for name, new in rewritten.items()]


def costs_of_rewritten(
    graphs: Mapping[str, StepGraph],
    before: MeasuredCosts,
    allowed: ComparisonLimits,
    compute_watts: float,
    progress: Progress,
) -> MeasuredCosts:
    """Return the costs of rewritten graphs.

    The process itself was measured `before`, and the dry run shows what they add.
    """
    fresh = allowed.measurer.measure(graphs.values(), allowed.threads, compute_watts, progress, resident=False)
    progress("compare", _COMPARED)
    return replace(before, ops=fresh.ops)


def compared(
    pairs: Sequence[tuple[StepGraph, RewrittenGraph]], allowed: ComparisonLimits
) -> tuple[tuple[Difference, ...], ...]:
    """Return for each graph the replacements that do not give the original's bits with this number
    of threads on this machine.

    One of each kind is run, in any graph. Results are kept in the user's cache for the next plan, by operators, shapes
    and layouts. Raises DryRunError if the process fails.
    """
    kept: AnswerFile[_Found] = AnswerFile("pieces", _Found, allowed.threads)  # type: ignore[arg-type]
    known = kept.read()
    keys = [[_key(graph, rewritten, r) for r in rewritten.replacements] for graph, rewritten in pairs]
    unknown, known_keys = list[tuple[StepGraph, RewrittenGraph]](), {*known}
    for (graph, rewritten), of in zip(pairs, keys, strict=True):
        first = {key: r for r, key in zip(rewritten.replacements, of, strict=True) if key not in known_keys}
        known_keys |= first.keys()
        if first:
            unknown.append((graph, replace(rewritten, replacements=tuple(first.values()))))
    if unknown:
        beside = allowed.measurer.compare(unknown, allowed.threads, allowed.ram_bytes, allowed.page_dir)
        for (graph, rewritten), found in zip(unknown, beside, strict=True):
            known |= {_key(graph, rewritten, r): None for r in rewritten.replacements}
            known |= {_key(graph, rewritten, d.replacement): (d.where, d.place) for d in found}
        kept.add(known)
    return tuple(
        tuple(
            Difference(r, *odd)
            for r, key in zip(rewritten.replacements, of, strict=True)
            if (odd := known[key]) is not None
        )
        for (_, rewritten), of in zip(pairs, keys, strict=True)
    )


def _key(graph: StepGraph, rewritten: RewrittenGraph, replacement: Replacement) -> str:
    return answer_key(form_of(graph, rewritten, replacement))
