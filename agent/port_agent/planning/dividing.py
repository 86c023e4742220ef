"""How `plan --place` divides a step's operators: between the CPU and a device, or among teams of the CPU's threads."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from port_agent.planning.machine import PlanMachine
from port_agent.planning.measuring import CapturedStep, Costs, StepTiling
from port_agent.planning.request import PlanRequest
from port_planner.ir.device_kinds import CPU

if TYPE_CHECKING:
    from port_agent.prepare.measurement.progress import Progress
    from port_planner.ir.costs import DeviceCosts
    from port_planner.make_bundle import CapturedJob
    from port_planner.profiling.operator_profile import MeasuredCosts


def divide_with_device(
    request: PlanRequest,
    recorded: CapturedStep,
    costs: Costs,
    tiling: StepTiling,
    captured: "CapturedJob",
    progress: "Progress",
) -> "tuple[CapturedJob, MeasuredCosts, DeviceCosts, Mapping[str, float]]":
    """Measure the operators also on the other device, and divide them.

    The expected results are then those of the operators run one at a time on their devices. Raises PlacementError if
    that saves no time.
    """
    from port_agent.prepare.making import device_costs
    from port_agent.prepare.measurement.measurement_worker import MeasurementWorker
    from port_agent.prepare.placement.divide import measured_links, placed_job
    from port_agent.prepare.placement.memories import PlacementMemory
    from port_agent.prepare.placement.reference import with_placed_reference
    from port_agent.prepare.pools import with_transfer_ring
    from port_agent.prepare.repeatable import reordered_in
    from port_planner.job_device import kind_of_job
    from port_planner.problem.placed_step import on_kind

    backend, threads = recorded.backend, costs.choice.threads
    watts = costs.device.compute_watts
    home = kind_of_job(recorded.job)
    other = backend.kind if home == CPU else CPU
    graphs = {name: on_kind(graph, other) for name, graph in captured.graphs.items()}
    there = MeasurementWorker(request.ram_bytes).measure(
        graphs.values(), threads, watts, progress, resident=False, elsewhere=True
    )
    if request.board is not None and other == CPU:
        there, _ = device_costs.other_board(graphs, there, costs.here, request.board)
    on_cpu, on_device = (tiling.measured, there) if home == CPU else (there, tiling.sliced.measured)
    if costs.drawn is not None:
        on_device = costs.drawn.applied(captured.graphs, on_device)
    links = measured_links(backend, watts)
    device = with_transfer_ring(costs.device, backend)
    op_memory = PlacementMemory(recorded.pools, device)
    found = placed_job(
        captured, on_cpu, on_device, backend.kind, links, watts, op_memory, time_limit_s=request.time_limit_s
    )
    reordered = reordered_in(found.captured.graphs.values(), allowed=request.reordered)
    made = with_placed_reference(
        replace(found.captured, reordered=reordered), captured.graphs, found.kinds, backend.kind
    )
    device = op_memory.costs(next(iter(made.graphs.values())), found.measured.ops[0]).device
    return made, found.measured, device, found.alone


def divide_among_teams(
    request: PlanRequest,
    recorded: CapturedStep,
    costs: Costs,
    machine: PlanMachine,
    captured: "CapturedJob",
    with_all: "MeasuredCosts",
    progress: "Progress",
) -> "tuple[CapturedJob, MeasuredCosts, Mapping[str, float]]":
    """Measure the operators with each further team of threads and divide them.

    The expected results are then those of the operators run one at a time with their teams. `with_all`: their times
    with the bundle's number of threads. Raises PlacementError if that saves nothing.
    """
    from port_agent.prepare.making import device_costs
    from port_agent.prepare.measurement.measurement_worker import MeasurementWorker
    from port_agent.prepare.placement.reference import with_placed_reference
    from port_agent.prepare.placement.teams import measured_times, on_cores_of, team_placement
    from port_planner.ir.devices.cpu_teams import CpuTeam

    threads, graphs = costs.choice.threads, captured.graphs
    teams = tuple(team for team in recorded.teams if team != CpuTeam(threads))
    powers = [machine.power(count) for count in (threads, *(team.threads for team in teams))]
    measured = [with_all]
    for team, power in zip(teams, powers[1:], strict=True):
        with on_cores_of(team):
            found = MeasurementWorker(request.ram_bytes).measure(
                graphs.values(), team.threads, power.compute_watts, progress, resident=False
            )
        measured.append(device_costs.by_class(graphs, found, power))
    times = measured_times(threads, teams)
    watts = [power.compute_watts for power in powers]
    made = team_placement(
        captured, measured, threads, teams, times, watts, powers[0].static_watts, time_limit_s=request.time_limit_s
    )
    kinds = {name: (CPU,) * len(graph.ops) for name, graph in graphs.items()}
    return with_placed_reference(made.captured, graphs, kinds, CPU), made.measured, made.alone
