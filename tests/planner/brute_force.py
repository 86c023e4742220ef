"""Finds the cheapest schedule of a small problem by trying all of them, without the solver's model."""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

from port_planner.problem.problem import (
    Alternative,
    Choice,
    GapDecision,
    Packing,
    Paging,
    Problem,
    Rematerialization,
    Schedule,
    Semantics,
    Stage,
    StageChange,
    StageGroup,
    Tensor,
    TileSaving,
)
from port_planner.problem.replay import ScheduleCost, replay


def random_problem(seed: int, *, semantics: Semantics = Semantics.POET, packing: bool = False) -> Problem:
    """Return a random problem of at most 8 stages with branches, several uses and in-place writes."""
    rng = random.Random(seed)
    size = rng.randint(5, 8)
    stages = tuple(Stage(f"s{t}", float(rng.randint(0, 4)), float(rng.randint(0, 6))) for t in range(size))
    inputs = [sorted(rng.sample(range(t), min(t, rng.choice((1, 1, 2))))) for t in range(size)]
    inplace = {t: rng.choice(inputs[t]) for t in range(2, size) if inputs[t] and rng.random() < 0.15}
    tensors = []
    for i in range(size):
        uses = sorted({t for t in range(i + 1, size) if i in inputs[t]})
        writes = [i, *(t for t in uses if inplace.get(t) == i)]
        tensors.append(_tensor(rng, i, (i, *uses), tuple(writes), inputs, inplace, stages, packing))
    peak = replay(Problem(stages, tuple(tensors), None), Schedule()).peak_bytes
    deadline = sum(s.seconds for s in stages) * rng.choice((1.2, 1.6, 3.0)) + 0.5
    least = max(sum(t.nbytes for t in tensors if s in t.accesses) for s in range(size))
    ram = int(least + (peak - least) * rng.uniform(0.0, 0.5))
    return Problem(
        stages,
        tuple(tensors),
        ram,
        deadline,
        semantics,
        static_watts=0.5,
        write_limit_bytes=rng.choice((None, None, 12.0)),
    )


def packed_pairs(seed: int) -> Problem:
    """Return a forward and a backward pass, each stage's tensor read once more in reverse order;
    all of them may be packed.
    """
    rng = random.Random(seed)
    size = 8
    stages = tuple(Stage(f"s{t}", rng.uniform(1, 4), 1.0) for t in range(size))
    tensors = []
    for i in range(size // 2):
        nbytes = rng.randint(4, 9)
        whole = Paging(0, rng.uniform(0, 2), rng.uniform(0, 2), float(rng.randint(1, 9)), float(rng.randint(1, 9)))
        smaller = Paging(0, whole.seconds_out / 2, whole.seconds_in / 2, whole.joules_out / 2, whole.joules_in / 2)
        packing = Packing(nbytes // 2, 0.3, float(rng.randint(1, 6)), (smaller,))
        pages = (whole,) if rng.random() < 0.7 else ()
        tensors.append(Tensor(f"t{i}", nbytes, (i, size - 1 - i), (i,), False, (None,), pages, (packing,)))
    peak = replay(Problem(stages, tuple(tensors), None), Schedule()).peak_bytes
    limit = rng.choice((None, 6.0))
    ram = int(peak * rng.uniform(0.5, 0.9))
    return Problem(stages, tuple(tensors), ram, None, Semantics.REAL, static_watts=0.5, write_limit_bytes=limit)


def beside_host_memory(problem: Problem, seed: int) -> Problem:
    """Return the problem of a device with its own memory: the host's is a second target, faster, cheaper and small."""
    rng = random.Random(seed)
    room = rng.randint(0, 6)
    tensors = tuple(
        replace(
            t, paging=(*t.paging, Paging(1, rng.uniform(0, 1), rng.uniform(0, 1), rng.uniform(0, 4), rng.uniform(0, 4)))
        )
        for t in problem.tensors
    )
    return replace(problem, tensors=tensors, targets=("flash", "host"), target_bytes=(None, room), links=(0, 1))


def with_a_weight(problem: Problem, seed: int, *, copied: bool = False) -> Problem:
    """Return the problem with a weight that is read in one stage and written in a later one.

    It may be paged to flash alone, or (`copied`) have a copy in the host's memory instead.
    """
    rng = random.Random(seed)
    first = rng.randrange(problem.size - 1)
    last = rng.randrange(first + 1, problem.size)
    flash = Paging(0, rng.uniform(0, 2), rng.uniform(0, 2), float(rng.randint(1, 9)), float(rng.randint(1, 9)))
    nbytes = rng.randint(1, 9)
    host = Paging(1, rng.uniform(0, 1), rng.uniform(0, 1), rng.uniform(0, 4), rng.uniform(0, 4))
    weight = Tensor("w", nbytes, (first, last), (last,), True, (None,), (flash, host) if copied else (flash,))
    return replace(problem, tensors=(*problem.tensors, weight))


def with_variants(problem: Problem, seed: int) -> Problem:
    """Return the problem with two groups of stages: two stages in tiles or whole, and one with another kernel."""
    rng = random.Random(seed)
    stages = sorted(rng.sample(range(problem.size), 3))
    kernel = stages.pop(rng.randrange(3))
    tiles = tuple(_tiles(rng, problem, stages, count) for count in (2, 4))
    held = {kernel: rng.randint(0, 6), **{s: rng.randint(0, 3) for s in stages}}
    change = _change(rng, problem, kernel, held[kernel])
    others = (Alternative("another kernel", (change,)), Alternative("one that takes more", (_more(change),)))
    groups = (
        StageGroup("chain", (Alternative("whole"), *tiles)),
        StageGroup("kernel", (Alternative("the usual"), *others)),
    )
    roomy = tuple(
        replace(stage, workspace_bytes=held.get(s, 0), fixed_bytes=rng.randint(0, 2))
        for s, stage in enumerate(problem.stages)
    )
    return replace(problem, stages=roomy, groups=groups, ram_bytes=(problem.ram_bytes or 0) + rng.randint(0, 4))


def _tiles(rng: random.Random, problem: Problem, stages: list[int], count: int) -> Alternative:
    """Return stages in this number of tiles: what they touch is there tile by tile where it is whole
    neither before nor after.
    """
    savings = list[TileSaving]()
    for i, tensor in enumerate(problem.tensors):
        touched = tuple(s for s in tensor.accesses if s in stages)
        around = [
            g
            for g in problem.gaps_of[i]
            if not problem.gaps[g].dead and {problem.gaps[g].after, problem.gaps[g].before} & set(touched)
        ]
        if touched and rng.random() < 0.8:
            savings.append(TileSaving(i, tensor.nbytes * (count - 1) // count, touched, tuple(around)))
    changes = [StageChange(s, rng.uniform(0, 0.5), rng.uniform(0, 1), 0, rng.randint(0, 1)) for s in stages]
    return Alternative(f"{count} tiles", tuple(changes), tuple(savings))


def _change(rng: random.Random, problem: Problem, stage: int, workspace_bytes: int) -> StageChange:
    seconds = rng.uniform(-min(1.0, problem.stages[stage].seconds), 1.0)
    return StageChange(stage, seconds, rng.uniform(-2, 2), rng.randint(-workspace_bytes, 3), rng.randint(-2, 2))


def _more(change: StageChange) -> StageChange:
    return replace(change, joules=change.joules + 2.0, fixed_bytes=change.fixed_bytes + 1)


def _tensor(
    rng: random.Random,
    i: int,
    accesses: tuple[int, ...],
    writes: tuple[int, ...],
    inputs: list[list[int]],
    inplace: dict[int, int],
    stages: tuple[Stage, ...],
    packing: bool,
) -> Tensor:
    def version(u: int, t: int) -> int:
        return sum(1 for w in inplace if inplace[w] == u and w < t)

    rematerializations: list[Rematerialization | None] = []
    for k in range(len(writes)):
        ops = writes[: k + 1]
        needs = {(u, version(u, t)) for t in ops for u in inputs[t] if u != i}
        distinct = len({u for u, _ in needs}) == len(needs)
        seconds, joules = sum(stages[t].seconds for t in ops), sum(stages[t].joules for t in ops)
        rematerializations.append(Rematerialization(seconds, joules, tuple(sorted(needs))) if distinct else None)
    nbytes = rng.randint(0, 9)
    paging = Paging(0, rng.uniform(0, 2), rng.uniform(0, 2), float(rng.randint(1, 9)), float(rng.randint(1, 9)))
    smaller = Paging(0, paging.seconds_out / 2, paging.seconds_in / 2, paging.joules_out / 2, paging.joules_in / 2)
    packed = Packing(nbytes // 2, 0.3, float(rng.randint(1, 6)), (smaller,)) if packing and rng.random() < 0.4 else None
    packings = () if packed is None else (packed,) * len(writes)
    pages = (paging,) if rng.random() < 0.8 else ()
    return Tensor(f"t{i}", nbytes, accesses, writes, False, tuple(rematerializations), pages, packings)


def cheapest(problem: Problem, most: int = 60_000) -> tuple[float | None, bool]:
    """Return the least cost of any valid schedule (None: there is none), and whether all could be tried."""
    options = [*_all_options(problem), *(group.alternatives for group in problem.groups)]
    if math.prod(map(len, options)) > most:
        return None, False
    found = (replay(problem, schedule) for schedule in every_schedule(problem))
    return min((cost(problem, one) for one in found if one.valid), default=None), True


def every_schedule(problem: Problem) -> Iterator[Schedule]:
    """Yield all combinations of decisions whose rematerializations can have their inputs, budgets apart."""
    for combination in itertools.product(*_all_options(problem)):
        schedule = with_intermediates(problem, tuple(c for c in combination if c is not None))
        for chosen in itertools.product(*(range(len(group.alternatives)) for group in problem.groups)):
            if schedule is not None:
                yield replace(schedule, variants=tuple((c, k) for c, k in enumerate(chosen) if k))


def _all_options(problem: Problem) -> list[list[Choice | None]]:
    return [list(_options(problem, g)) for g in range(len(problem.gaps)) if not problem.gaps[g].dead]


def cost(problem: Problem, found: ScheduleCost) -> float:
    """Return what planning minimises."""
    return found.overhead_joules + problem.static_watts * found.stall_seconds


def _options(problem: Problem, g: int) -> Iterator[Choice | None]:
    gap = problem.gaps[g]
    tensor = problem.tensors[gap.tensor]
    yield None
    for s in range(gap.after + 1, gap.before + 1):
        if tensor.rematerializations[gap.version] is not None:
            yield Choice(g, s, GapDecision.RECOMPUTE)
        if s >= gap.after + 2:
            yield from (Choice(g, s, GapDecision.PAGE, paging.target) for paging in tensor.paging)
    if (packing := tensor.packing(gap.version)) is not None:
        yield Choice(g, gap.before, GapDecision.PACK)
        if gap.before >= gap.after + 2:
            yield from (Choice(g, gap.before, GapDecision.PACK_PAGE, paging.target) for paging in packing.paging)


def with_intermediates(problem: Problem, choices: tuple[Choice, ...]) -> Schedule | None:
    """Return the schedule with the intermediates that its rematerializations call for; None
    if an input cannot be had.
    """
    present = {(i, t) for i, tensor in enumerate(problem.tensors) for t in tensor.accesses if t != tensor.birth}
    chosen = {c.gap: c for c in choices}
    for g, gap in enumerate(problem.gaps):
        if gap.dead or (g in chosen and chosen[g].decision in (GapDecision.PACK, GapDecision.PACK_PAGE)):
            continue
        start = chosen[g].stage if g in chosen else gap.after + 1
        present |= {(gap.tensor, t) for t in range(start, gap.before)}
    rematerialized = {
        (problem.gaps[c.gap].tensor, c.stage): problem.gaps[c.gap].version
        for c in choices
        if c.decision is GapDecision.RECOMPUTE
    }
    todo = list(rematerialized.items())
    intermediates: dict[tuple[int, int], int] = {}
    while todo:
        (i, s), version = todo.pop()
        rematerialization = problem.tensors[i].rematerializations[version]
        if rematerialization is None:
            return None
        for u, v in rematerialization.inputs:
            known = rematerialized.get((u, s), intermediates.get((u, s)))
            if known is None and (u, s) not in present:
                intermediates[u, s] = v
                todo.append(((u, s), v))
    return Schedule(choices, tuple(sorted(intermediates)))
