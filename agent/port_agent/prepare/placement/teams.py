"""Operators of a job's graphs divided among teams of the CPU's threads: different numbers of threads, or
the cores of one cluster.

Some operators gain nothing from a second thread, and one thread draws less. All teams compute in the same
memory, so nothing is transferred. The costs of passing an operator to a team, and of switching between teams,
are measured and counted.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from port_agent.backend.team_threads import CpuTeams
from port_agent.prepare.placement.divide import PlacementError
from port_planner.ir.costs import OpCost
from port_planner.ir.devices.cpu_teams import CpuTeam
from port_planner.make_bundle import CapturedJob
from port_planner.profiling.operator_profile import MeasuredCosts
from port_planner.profiling.timing import shortest_run_s
from port_planner.search.placement.operator_devices import (
    DeviceChoice,
    DeviceLink,
    DeviceProblem,
    Goal,
    choose_devices,
    on_one_device,
)

_REPEATS = 200
_SPREAD_ITEMS = 1 << 17
"""Elements from which torch divides an elementwise operator among threads; it needs 32,768 for each."""


@dataclass(frozen=True, slots=True)
class TeamTimes:
    """Seconds of handing one operator to each team, and additional seconds from one team to the next."""

    entry_s: tuple[float, ...]
    switch_s: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class TeamPlacement:
    """The job with graphs whose operators name their teams, and their costs.

    `choice`: choice for the main graph; `alone`: the seconds of its operators on each team.
    """

    captured: CapturedJob
    measured: MeasuredCosts
    choice: DeviceChoice
    alone: Mapping[str, float]


def measured_times(threads: int, teams: Sequence[CpuTeam]) -> TeamTimes:
    """Return the overhead of teams besides their operators; number 0 is the team of all `threads`."""
    count = 1 + len(teams)
    with CpuTeams(threads, teams) as made, torch.no_grad():
        numbers, out = torch.ones(_SPREAD_ITEMS), torch.empty(_SPREAD_ITEMS)
        spread = [made.runs(team, lambda: torch.add(numbers, 1.0, out=out)) for team in range(count)]
        entry = tuple(0.0 if team == 0 else shortest_run_s(made.runs(team, int), _REPEATS) for team in range(count))
        alone = [shortest_run_s(run, _REPEATS) for run in spread]

        def between(a: int, b: int) -> float:
            both = shortest_run_s(lambda: (spread[a](), spread[b]()), _REPEATS)
            return max(0.0, both - alone[a] - alone[b]) / 2

        pairs = {(a, b): between(a, b) for a in range(count) for b in range(a)}
    return TeamTimes(
        entry, tuple(tuple(pairs.get((max(a, b), min(a, b)), 0.0) for b in range(count)) for a in range(count))
    )


@contextmanager
def on_cores_of(team: CpuTeam) -> Iterator[None]:
    """Run processes that are started in the block only on a team's cores."""
    if not team.cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, team.cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def team_placement(
    captured: CapturedJob,
    measured: Sequence[MeasuredCosts],
    threads: int,
    teams: Sequence[CpuTeam],
    times: TeamTimes,
    watts: Sequence[float],
    static_watts: float,
    *,
    time_limit_s: float,
) -> TeamPlacement:
    """Return the job with each operator on the team that takes the fewest joules, without taking longer than
    the fastest team for all.

    `measured`, `watts`: costs and power of each team, beginning with number 0, all `threads`. Raises PlacementError if
    one team alone takes as little.
    """
    graphs, ops = dict(captured.graphs), list[tuple[OpCost, ...]]()
    names = [CpuTeam(threads).text, *(team.text for team in teams)]
    first: tuple[DeviceChoice, Mapping[str, float]] | None = None
    links = tuple((DeviceLink(),) * len(names) for _ in names)
    for place, (name, graph) in enumerate(captured.graphs.items()):
        costs = tuple(
            tuple(_with_entry(m.ops[place][i], s, w) for m, s, w in zip(measured, times.entry_s, watts, strict=True))
            for i in range(len(graph.ops))
        )
        problem = DeviceProblem(costs, (), links, static_watts, switch_s=times.switch_s)
        alone = on_one_device(problem)
        fastest = min(alone.values(), key=lambda c: c.seconds)
        choice = choose_devices(problem, Goal.JOULES, time_limit_s, within=fastest)
        if first is None:
            first = choice, {names[d]: c.seconds for d, c in alone.items()}
            if len(set(choice.devices)) == 1:
                raise PlacementError(_one_is_best(first[1], times))
        graphs[name] = replace(
            graph, ops=tuple(replace(op, team=d) for op, d in zip(graph.ops, choice.devices, strict=True))
        )
        ops.append(_costs(problem, choice, watts))
    if first is None:
        raise PlacementError("the job has no graph; capture it again")
    there = replace(captured, graphs=graphs, teams=tuple(teams))
    return TeamPlacement(there, replace(measured[0], ops=tuple(ops), packings=(), absent=()), *first)


def _with_entry(cost: OpCost, entry_s: float, watts: float) -> OpCost:
    return replace(cost, seconds=cost.seconds + entry_s, joules=cost.joules + entry_s * watts)


def _costs(problem: DeviceProblem, choice: DeviceChoice, watts: Sequence[float]) -> tuple[OpCost, ...]:
    """Return the costs of operators on their teams, including the switch from the previous one."""
    found, before = [], choice.devices[-1]
    for costs, team in zip(problem.costs, choice.devices, strict=True):
        cost = costs[team]
        if cost is None:
            raise PlacementError("an operator was placed on a team that it was not measured on; report this")
        found.append(_with_entry(cost, problem.switch_s[before][team], watts[team]))
        before = team
    return tuple(found)


def _one_is_best(alone: Mapping[str, float], times: TeamTimes) -> str:
    taken = ", ".join(f"{1e3 * seconds:.3g} ms with {where}" for where, seconds in alone.items())
    costliest = max(max(row) for row in times.switch_s) + max(times.entry_s)
    return (
        f"no division of the operators among threads saves energy in as little time: a step's take {taken}, and from "
        f"one to another {1e6 * costliest:.2g} microseconds; leave out --place; --threads sets one number for all"
    )
