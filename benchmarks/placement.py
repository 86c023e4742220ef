"""Operators of a step divided between a CPU and a GPU, compared with all on one of them:
`python -m benchmarks.placement [CASE ...]`.

The table of the two devices is synthetic. The CPU is a board's (estimated costs); the GPU starts an operator in that
many microseconds, does dense ones and those bound by memory that many times as fast, and draws other watts. What moves
between them pays latency, seconds and joules, or, with `--unified`, a synchronisation alone. A line for each goal:
joules with no more seconds than on the device that takes fewest joules, and the other way round. Ends with 1 where a
choice is worse than one device.

`--execute KIND` (cuda, mps) measures instead: operators on this machine's CPU and on that device, what moves between
them, then runs the step all on the CPU, all on the device, and divided by least seconds, and compares the divided one
with its operators one by one. Where there is no such device it says so: the simulated one is known to the tests alone.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.device_steps import DeviceRun, Job, digest, planned_steps
from benchmarks.models import CASES, make_optimizer, workload
from port_agent.backend.base import Backend, DeviceAbsentError
from port_agent.backend.choose import backend_of
from port_agent.prepare.placement.divide import measured_links
from port_agent.prepare.placement.eager import EagerStep, eager_contents
from port_planner.base.units import format_bytes, format_seconds
from port_planner.capture.step import Capture, Fill, capture_step
from port_planner.ir.boards import Board, estimated_costs, load_board, op_work
from port_planner.ir.costs import CostTable, DeviceCosts, Flash, OpCost
from port_planner.ir.device_kinds import CPU
from port_planner.ir.graph import StepGraph
from port_planner.ir.lowering.lower import lower
from port_planner.ir.lowering.optimizer_scalars import StepScalars
from port_planner.ir.plan import Plan
from port_planner.problem.placed_step import on_kind, placed_step
from port_planner.profiling.operator_profile import profile_operators
from port_planner.search.placement.operator_devices import (
    DeviceChoice,
    DeviceLink,
    DeviceProblem,
    Goal,
    choose_devices,
    contents_of,
    on_one_device,
    together_of,
)

CASES_DIVIDED = ("resnet18", "gpt2")
START_S = 20e-6
"""Seconds to start an operator on the GPU, the host's time included: launches cost 5 to 50 microseconds."""
DENSE, BY_MEMORY = 30.0, 6.0
"""Speed as a multiple of the CPU's: about the ratio between an Orin's GPU and its eight cores."""
GPU_WATTS = 12.0
"""Watts while it computes, besides what the board takes at rest."""
COPY = DeviceLink(15e-6, 1 / 6e9, 1e-10)
SYNCHRONISE = DeviceLink(10e-6)
TOLERANCE = 1e-6


def capture(case: str) -> StepGraph:
    """Return the training step of a small model with its usual optimizer."""
    made = workload(case, small=True)
    optimizer = make_optimizer(CASES[case][0], made.model.parameters())
    return capture_step(made.model, made.loss_fn, optimizer, made.batch(0)).graphs["step"]


def two_devices(graph: StepGraph, board: Board, *, unified: bool) -> DeviceProblem:
    """Return the step on the board's CPU (device 0) and the synthetic GPU (device 1)."""
    estimated = estimated_costs(graph, board)
    costs = []
    for i, cpu in enumerate(estimated.ops):
        seconds = START_S + cpu.seconds / (DENSE if op_work(graph, i).dense else BY_MEMORY)
        costs.append((cpu, OpCost(seconds, cpu.workspace_bytes, GPU_WATTS * seconds)))
    between = SYNCHRONISE if unified else COPY
    links = ((DeviceLink(), between), (between, DeviceLink()))
    return DeviceProblem(tuple(costs), contents_of(graph), links, estimated.device.static_watts)


def is_worse(problem: DeviceProblem, found: DeviceChoice, goal: Goal) -> bool:
    """Return whether a choice takes more joules or seconds than the device that is best at the goal."""
    best = min(on_one_device(problem).values(), key=lambda c: c.amount(goal))
    return any(found.amount(g) > best.amount(g) * (1 + TOLERANCE) for g in Goal)


STEPS = 5
"""Steps of each way to run: the first ones load kernels and allocate memory."""
WATTS = 1.0
"""Of either device: nobody measures a device's watts, and the goal is time."""
_NOWHERE = Flash("nowhere", 1.0, 1.0, 0.0, 0.0, 0.0)
"""No plan here pages."""


@dataclass(frozen=True, slots=True)
class Executed:
    """A step divided by measured costs: predicted and taken seconds by how it ran, and whether the
    bits were the reference's.
    """

    devices: tuple[int, ...]
    moved_bytes: int
    predicted: dict[str, float]
    taken: dict[str, float]
    equal: bool


def executed(case: str, backend: Backend, time_limit_s: float) -> Executed:
    """Measure, divide and run the step of a small model on the CPU and this device."""
    made = workload(case, small=True)
    job = Job(case, lambda: workload(case, small=True), CASES[case][0])
    optimizer = make_optimizer(CASES[case][0], made.model.parameters())
    capture = capture_step(made.model, made.loss_fn, optimizer, made.batch(0))
    graph, kinds = capture.graphs["step"], (CPU, backend.kind)
    measured = [profile_operators((on_kind(graph, kind),), compute_watts=WATTS, elsewhere=True) for kind in kinds]
    costs = [[None if i in m.absent[0] else cost for i, cost in enumerate(m.ops[0])] for m in measured]
    links = measured_links(backend, WATTS)
    problem = DeviceProblem(
        tuple(zip(*costs, strict=True)), contents_of(graph), links.table, together=together_of(graph)
    )
    found, alone = choose_devices(problem, Goal.SECONDS, time_limit_s), on_one_device(problem)
    ways = {kinds[d]: (kinds[d],) * len(graph.ops) for d in alone}
    ways["divided"] = tuple(kinds[d] for d in found.devices)
    runs = {name: _run(job, capture, way, backend) for name, way in ways.items()}
    expected = _one_by_one(capture, ways["divided"], [made.batch(i) for i in range(STEPS)])
    predicted = {**{kinds[d]: choice.seconds for d, choice in alone.items()}, "divided": found.seconds}
    taken = {name: run.seconds for name, run in runs.items()}
    return Executed(found.devices, found.moved_bytes, predicted, taken, runs["divided"].losses == expected)


def _run(job: Job, capture: Capture, kinds: Sequence[str], backend: Backend) -> DeviceRun:
    graph = placed_step(capture.graphs["step"], kinds).graph
    costs = CostTable(DeviceCosts("here", 0, 0.0, WATTS, _NOWHERE), tuple(OpCost(0.0, 0, 0.0) for _ in graph.ops))
    with tempfile.TemporaryDirectory() as folder:
        return planned_steps(job, capture, lower(graph, costs, Plan()), backend, Path(folder), STEPS)


def _one_by_one(capture: Capture, kinds: Sequence[str], batches: Sequence[Sequence[torch.Tensor]]) -> list[str]:
    """Return digests of the losses that the operators give one by one."""
    if capture.optimizer is None:
        raise ValueError("the step was captured without an optimizer")
    tensors = {
        key: torch.full(t.shape, t.value, dtype=getattr(torch, t.dtype)) if isinstance(t, Fill) else t
        for key, t in capture.tensors.items()
    }
    step, scalars = EagerStep(capture.graphs["step"], kinds, eager_contents(tensors)), StepScalars(capture.optimizer)
    torch.manual_seed(0)
    return [digest(step.run([t for t in batch if isinstance(t, torch.Tensor)], scalars.advance())) for batch in batches]


def _execute(cases: Sequence[str], kind: str, time_limit_s: float) -> int:
    """Print what a step takes on either device and divided; return 1 where bits differ, 0 where
    there is no such device, too.
    """
    try:
        backend = backend_of(kind)
    except DeviceAbsentError as error:
        print(f"nothing was executed: {error}")
        return 0
    table = Table(
        "step", "runs", "predicted", "taken", "on CPU, device", "moved", "bits", title=f"CPU and {kind}, measured"
    )
    different = 0
    for case in cases:
        found = executed(case, backend, time_limit_s)
        counts = Counter(found.devices)
        different += not found.equal
        for name, seconds in found.taken.items():
            mine = name == "divided"
            table.add_row(
                case,
                name,
                format_seconds(found.predicted[name]),
                format_seconds(seconds),
                f"{counts[0]}, {counts[1]}" if mine else "",
                format_bytes(found.moved_bytes) if mine else "",
                ("those of its operators" if found.equal else "DIFFERENT") if mine else "",
            )
    Console(width=120).print(table)
    return 1 if different else 0


def _cells(choice: DeviceChoice) -> tuple[str, str]:
    return f"{choice.joules:.4g}", format_seconds(choice.seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks.placement", description=__doc__.partition("\n\n")[0])
    parser.add_argument("cases", nargs="*", default=CASES_DIVIDED, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--board", default="pi5", help="whose CPU it is (default: pi5)")
    parser.add_argument("--unified", action="store_true", help="both compute in the same memory")
    parser.add_argument("--time-limit", type=float, default=30.0, metavar="SECONDS", help="for each choice")
    parser.add_argument("--execute", metavar="KIND", help="measure and run on this machine's CPU and this device")
    options = parser.parse_args(arguments)
    if options.execute is not None:
        return _execute(options.cases, options.execute, options.time_limit)
    table = Table(
        "step",
        "goal",
        "CPU: J",
        "time",
        "GPU: J",
        "time",
        "divided: J",
        "time",
        "on CPU, GPU",
        "moved",
        title=f"synthetic GPU beside the CPU of {options.board} (estimated)",
    )
    worse = 0
    for case in options.cases:
        problem = two_devices(capture(case), load_board(options.board), unified=options.unified)
        alone = on_one_device(problem)
        for goal in Goal:
            found = choose_devices(problem, goal, options.time_limit)
            worse += is_worse(problem, found, goal)
            counts = Counter(found.devices)
            table.add_row(
                case,
                goal.value,
                *_cells(alone[0]),
                *_cells(alone[1]),
                *_cells(found),
                f"{counts[0]}, {counts[1]}",
                format_bytes(found.moved_bytes),
            )
    Console(width=120).print(table)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
