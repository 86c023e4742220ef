"""Operators of a step divided between a CPU and a GPU, beside all on one of them: `python -m benchmarks.placement [CASE ...]`.

The table of the two devices is synthetic. The CPU is a board's (estimated costs); the GPU starts an operator in so many
microseconds, does dense ones and those bound by memory so many times as fast, and draws other watts. What moves between them pays latency,
seconds and joules, or, with `--unified`, a synchronisation alone. A line for each goal: joules with no more seconds than on the device
that takes fewest joules, and the other way round. Ends with 1 where a choice is worse than one device.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.models import CASES, make_optimizer, workload
from planner.capture.step import capture_step
from planner.ir.boards import Board, estimated_costs, load_board, op_work
from planner.ir.costs import OpCost
from planner.ir.graph import StepGraph
from planner.ir.units import format_bytes, format_seconds
from planner.search.operator_devices import (
    DeviceChoice,
    DeviceLink,
    DeviceProblem,
    Goal,
    choose_devices,
    contents_of,
    on_one_device,
)

CASES_DIVIDED = ("resnet18", "gpt2")
START_S = 20e-6
"""Of an operator on the GPU, its host's time included: launches cost 5 to 50 microseconds."""
DENSE, BY_MEMORY = 30.0, 6.0
"""Times as fast as the CPU: about what separates an Orin's GPU from its eight cores."""
GPU_WATTS = 12.0
"""While it computes, beside what the board takes at rest."""
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
    """Say whether a choice takes more joules or seconds than the device that is best at the goal."""
    best = min(on_one_device(problem).values(), key=lambda c: c.amount(goal))
    return any(found.amount(g) > best.amount(g) * (1 + TOLERANCE) for g in Goal)


def _cells(choice: DeviceChoice) -> tuple[str, str]:
    return f"{choice.joules:.4g}", format_seconds(choice.seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks.placement", description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=CASES_DIVIDED, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--board", default="pi5", help="whose CPU it is (default: pi5)")
    parser.add_argument("--unified", action="store_true", help="both compute in the same memory")
    parser.add_argument("--time-limit", type=float, default=30.0, metavar="SECONDS", help="for each choice")
    options = parser.parse_args(arguments)
    table = Table(
        "step", "goal", "CPU: J", "time", "GPU: J", "time", "divided: J", "time", "on CPU, GPU", "moved",
        title=f"synthetic GPU beside the CPU of {options.board} (estimated)",
    )  # fmt: skip
    worse = 0
    for case in options.cases:
        problem = two_devices(capture(case), load_board(options.board), unified=options.unified)
        alone = on_one_device(problem)
        for goal in Goal:
            found = choose_devices(problem, goal, options.time_limit)
            worse += is_worse(problem, found, goal)
            counts = Counter(found.devices)
            table.add_row(
                case, goal.value, *_cells(alone[0]), *_cells(alone[1]), *_cells(found),
                f"{counts[0]}, {counts[1]}", format_bytes(found.moved_bytes),
            )  # fmt: skip
    Console(width=120).print(table)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
