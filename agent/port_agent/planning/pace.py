"""The time that a deadline allows for a step, and by how much a step misses it."""

from datetime import datetime, time
from typing import TYPE_CHECKING

from port_planner.base.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from port_planner.deadline import Pace
    from port_planner.ir.costs import CostTable
    from port_planner.ir.graph import StepGraph


def wanted_pace(
    deadline_at: float | None, charging: tuple[time, time] | None, epochs: int, steps_per_epoch: int
) -> "Pace | None":
    """Return the pace that a deadline, in seconds since 1970, and the hours of charging allow for one
    step; None without a deadline.
    """
    from port_planner.deadline import Window, pace

    if deadline_at is None:
        return None
    window = Window(*charging) if charging else None
    until = datetime.fromtimestamp(deadline_at)
    return pace(datetime.now(), until, window, epochs=epochs, steps_per_epoch=steps_per_epoch)


def too_slow(graph: "StepGraph", costs: "CostTable", wanted: "Pace", ram_bytes: int, fastest_s: float) -> str:
    """Return by how much a step of `fastest_s` misses the deadline within `ram_bytes`, and the
    budget that would meet it.
    """
    from port_planner.deadline import shortfall
    from port_planner.ir.lowering.lower import lower
    from port_planner.ir.plan import Plan
    from port_planner.search.pareto import budget_for

    most = max(lower(graph, costs, Plan(), check_budget=False).peak_bytes, ram_bytes)
    limits = [round(ram_bytes + (most - ram_bytes) * k / 6) for k in range(1, 7)]
    enough = budget_for(graph, costs, wanted.seconds_per_step, limits)
    text = shortfall(wanted, fastest_s, None if enough is None else format_bytes(enough))
    return text or f"a step of {format_seconds(fastest_s)} is in time"
