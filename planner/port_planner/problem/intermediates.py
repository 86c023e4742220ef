"""The intermediates that the rematerializations of a schedule actually read."""

from port_planner.problem.problem import Choice, GapDecision, Problem, Schedule


def prune_intermediates(problem: Problem, choices: tuple[Choice, ...], wanted: set[tuple[int, int]]) -> Schedule:
    """Return the schedule without intermediates that are resident anyway or that no
    rematerialization of their stage reads.
    """
    chosen = {choice.gap: choice for choice in choices}
    todo = [
        (problem.gaps[c.gap].tensor, problem.gaps[c.gap].version, c.stage % problem.size)
        for c in choices
        if c.decision is GapDecision.RECOMPUTE
    ]
    back = {(i, s) for i, _, s in todo}
    kept: set[tuple[int, int]] = set()
    while todo:
        i, version, s = todo.pop()
        rematerialization = problem.tensors[i].rematerializations[version]
        for u, v in rematerialization.inputs if rematerialization is not None else ():
            if (u, s) in wanted and (u, s) not in kept and (u, s) not in back and not _present(problem, chosen, u, s):
                kept.add((u, s))
                todo.append((u, v, s))
    return Schedule(choices, tuple(sorted(kept)))


def _present(problem: Problem, chosen: dict[int, Choice], tensor: int, stage: int) -> bool:
    """Return whether a tensor is resident at `stage`: used there, kept through an idle gap, or already restored."""
    if stage in problem.found_versions[tensor]:
        return stage != problem.tensors[tensor].birth
    g = problem.gap_at(tensor, stage)
    if g is None or problem.gaps[g].dead:
        return False
    at = stage if stage > problem.gaps[g].after else stage + problem.size
    choice = chosen.get(g)
    return choice is None or (choice.decision not in (GapDecision.PACK, GapDecision.PACK_PAGE) and at >= choice.stage)
