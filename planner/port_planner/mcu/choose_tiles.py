"""Choose the operators that run in bands: as few as possible, in bands as tall as possible, so that
every stage fits the budget.

Recomputation cannot make a stage need less than its own operands; bands can. A group costs a halo of lines
and its sums, a few percent. So groups are formed only where a stage is too large, one at a time, the
cheapest that is small enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from port_planner.mcu.autodiff import SampleProgram, SparseScheme
from port_planner.mcu.board_problem import BoardProblem, PageOptions, Unit, board_problem
from port_planner.mcu.core_costs import CoreCosts
from port_planner.mcu.tiles import TileGroup, make_group, tile_groups
from port_planner.problem.problem import Problem


def stage_loads(problem: Problem) -> list[int]:
    """Return the bytes of every stage's own operands and workspace, a floor for any recomputation."""
    load = [stage.workspace_bytes for stage in problem.stages]
    for tensor in problem.tensors:
        for stage in tensor.accesses:
            load[stage] += tensor.nbytes
    return load


def choose_tiles(
    program: SampleProgram,
    scheme: SparseScheme,
    costs: CoreCosts,
    arena_bytes: int,
    *,
    simd: bool = True,
    pages: PageOptions | None = None,
) -> BoardProblem:
    """Return the problem whose fullest stage fits `arena_bytes`, or is as small as bands make it."""
    known: dict[int | TileGroup, Unit] = {}

    def stated(groups: Sequence[TileGroup]) -> BoardProblem:
        return board_problem(program, scheme, costs, arena_bytes, simd=simd, groups=groups, known=known, pages=pages)

    found = stated(())
    while True:
        loads = stage_loads(found.problem)
        fullest = max(range(len(loads)), key=loads.__getitem__)
        if loads[fullest] <= arena_bytes:
            return found
        better = _best(stated, found, found.starts[fullest], arena_bytes)
        if better is None:
            return found
        found = better


def _best(
    stated: Callable[[Sequence[TileGroup]], BoardProblem], found: BoardProblem, step: int, arena_bytes: int
) -> BoardProblem | None:
    """Return the problem with one group added or replaced at `step`: the cheapest one that fits, else the smallest."""
    best: tuple[tuple[int, int, float], BoardProblem] | None = None
    now = _rank(found, arena_bytes)
    for groups in _next_groups(found.program, found.groups, step):
        tried = stated(groups)
        rank = _rank(tried, arena_bytes)
        if rank < now and (best is None or rank < best[0]):
            best = rank, tried
    return None if best is None else best[1]


def _rank(found: BoardProblem, arena_bytes: int) -> tuple[int, int, float]:
    """Rank problems by the bytes over the budget in their fullest stage, then by stages over it, then by seconds."""
    over = [load - arena_bytes for load in stage_loads(found.problem) if load > arena_bytes]
    return max(over, default=0), sum(over), found.problem.base_seconds


def _next_groups(program: SampleProgram, groups: Sequence[TileGroup], step: int) -> Iterator[tuple[TileGroup, ...]]:
    """Yield the groups after adding one that covers `step`, or after it replaces those that it overlaps."""
    op = program.steps[step].op
    for run in tile_groups(program):
        if op not in run:
            continue
        at = run.index(op)
        for low in range(len(run) - 1):
            for high in range(max(low + 2, at), len(run) + 1):
                if not (low <= at <= high):
                    continue
                for made in _sizes(program, run[low:high]):
                    kept = [group for group in groups if group.stop <= made.start or group.start >= made.stop]
                    yield tuple(sorted((*kept, made), key=lambda group: group.start))


def _sizes(program: SampleProgram, ops: tuple[str, ...]) -> Iterator[TileGroup]:
    """Yield groups of these operators in bands of half the lines, of a quarter and so on, in both ways."""
    height = program.graph.op(ops[0]).out_shape.height
    for forward in (False, True):
        lines = -(-height // 2)
        while lines >= 1:
            made = make_group(program, ops, lines, forward)
            if made is None:
                return
            yield made
            lines //= 2
