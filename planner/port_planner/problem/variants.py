"""Alternatives of groups of stages: which of them no schedule needs, and the most that choosing
among the others can save.
"""

from collections import defaultdict

from port_planner.problem.problem import Alternative, Problem, StageGroup


def undominated(problem: Problem, group: StageGroup) -> tuple[int, ...]:
    """Return, by number, the alternatives of a group that are worth offering: no other one takes at
    most as much of everything.

    Of equal ones, the first is kept.
    """
    kept = list[int]()
    for k, one in enumerate(group.alternatives):
        others = group.alternatives
        if not any(_dominates(problem, others[j], one) for j in kept):
            kept = [j for j in kept if not _dominates(problem, one, others[j])] + [k]
    return tuple(kept)


def min_extra_joules(problem: Problem) -> float:
    """Return the joules of the cheapest alternatives of all groups, relative to those of the first ones; at most 0."""
    return sum(min(one.joules for one in group.alternatives) for group in problem.groups)


def _dominates(problem: Problem, one: Alternative, other: Alternative) -> bool:
    """Return whether `one` may replace `other` in every schedule, because it takes no more time, memory or joules.

    A shorter stage hides less of a transfer: the static power of the additional wait counts as its joules.
    """
    mine, theirs = _by_stage(one), _by_stage(other)
    zero = (0.0, 0.0, 0.0)
    for stage in mine.keys() | theirs.keys():
        if any(a > b for a, b in zip(mine.get(stage, zero), theirs.get(stage, zero), strict=True)):
            return False
    waited = problem.static_watts * (other.seconds - one.seconds)
    return one.joules + waited <= other.joules and _saves_as_much(one, other)


def _by_stage(one: Alternative) -> dict[int, tuple[float, float, float]]:
    """Return seconds, bytes before a stage's output exists, and bytes afterwards, beyond the first alternative's."""
    return {c.stage: (c.seconds, c.fixed_bytes, c.fixed_bytes + c.workspace_bytes) for c in one.changes}


def _saves_as_much(one: Alternative, other: Alternative) -> bool:
    """Return whether `one` holds no more of any tensor than `other` wherever `other` saves some of it."""
    saved = defaultdict[tuple[int, int], list[tuple[int, frozenset[int]]]](list)
    for saving in one.savings:
        for stage in saving.stages:
            saved[saving.tensor, stage].append((saving.nbytes, frozenset(saving.gaps)))
    return all(
        any(nbytes >= saving.nbytes and gaps <= set(saving.gaps) for nbytes, gaps in saved[saving.tensor, stage])
        for saving in other.savings
        for stage in saving.stages
    )
