"""Solves planning problems and prints one table: overhead, bound, gap, CPU time.

    python -m benchmarks.planning FILE... --semantics poet|real --out DIR [--time-limit 8] [--strategy milp] [--json]
    python -m benchmarks.planning --generate bert:62 --generate bert:187 --generate residual:70 --time-limit 30
    python -m benchmarks.planning --captured resnet50 --captured gpt2 [--board pi4b] [--percent 50] --time-limit 20

FILE is a problem of POET's kind (see benchmarks.poet); generated ones are described in benchmarks.poet_stacks. A
captured one is the training step of a model of benchmarks.models on a board (estimated costs), within a share of the
memory that it takes when everything is kept; recording it is not counted, coarsening and lowering are. DIR receives
ID.solution.json in the checker's format for every problem that has a plan, and ID.json for generated ones.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.poet import Instance, parse_instance, read_instance, write_solution
from benchmarks.poet_stacks import generate
from port_planner.base.errors import PortError
from port_planner.ir.boards import estimated_costs, load_board
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.problem.problem import Semantics
from port_planner.search.plan_step import plan_step
from port_planner.search.solve import Outcome, solve


@dataclass(frozen=True, slots=True)
class Row:
    """One problem and what the planner made of it. `overhead_joules` is what the checker counts.

    `greedy_joules`: the result of the greedy rung alone, waiting included.
    """

    id: str
    nodes: int
    outcome: str
    overhead_joules: float | None
    waiting_joules: float | None
    greedy_joules: float | None
    greedy_cpu_seconds: float
    bound_joules: float | None
    gap: float | None
    seconds: float | None
    deadline_s: float | None
    stall_seconds: float | None
    peak_bytes: int | None
    ram_bytes: int | None
    cpu_seconds: float
    message: str


def plan_file(path: Path, semantics: Semantics, out: Path | None, time_limit_s: float, strategy: str) -> Row:
    """Solve the problem in `path`, write its solution below `out`, and return the table's row."""
    return plan_instance(read_instance(path, semantics), out, time_limit_s, strategy)


def plan_generated(text: str, semantics: Semantics, out: Path | None, time_limit_s: float, strategy: str) -> Row:
    """Solve a generated problem and write it and its solution below `out`; the same row as for a file."""
    data = generate(text)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{data['id']}.json").write_text(json.dumps(data))
    return plan_instance(parse_instance(data, text, semantics), out, time_limit_s, strategy)


def plan_instance(instance: Instance, out: Path | None, time_limit_s: float, strategy: str) -> Row:
    """Solve `instance`, write its solution below `out`, and return the table's row; generating it is not counted."""
    problem = instance.problem
    begin = time.process_time()
    quick = solve(problem, strategy="greedy").overhead_joules
    greedy_cpu_seconds = time.process_time() - begin
    begin = time.process_time()
    solution = solve(problem, time_limit_s=time_limit_s, strategy=strategy)
    if solution.schedule is not None and out is not None:
        write_solution(out / f"{instance.id}.solution.json", problem, solution.schedule)
    found = solution.evaluation
    return Row(
        id=instance.id,
        nodes=problem.size,
        outcome=solution.outcome.name.lower(),
        overhead_joules=found.overhead_joules if found else None,
        waiting_joules=found.static_joules if found else None,
        greedy_joules=quick,
        greedy_cpu_seconds=greedy_cpu_seconds,
        bound_joules=solution.bound_joules,
        gap=solution.gap,
        seconds=found.seconds if found else None,
        deadline_s=problem.deadline_s,
        stall_seconds=found.stall_seconds if found else None,
        peak_bytes=found.peak_bytes if found else solution.needed_bytes,
        ram_bytes=problem.ram_bytes,
        cpu_seconds=time.process_time() - begin,
        message=solution.message,
    )


def plan_captured(name: str, board: str, percent: int, time_limit_s: float, strategy: str) -> Row:
    """Plan the recorded step of a model on a board, within a share of what its tensors take when all are kept."""
    from benchmarks.energy_frontier import capture  # with torch, which problem files do without

    graph = capture(name)
    costs = estimated_costs(graph, load_board(board))
    base = costs.device.base_bytes
    ram_bytes = base + round((lower(graph, costs, Plan()).peak_bytes - base) * percent / 100)
    quick = plan_step(graph, costs, ram_bytes=ram_bytes, strategy="greedy")
    begin = time.process_time()
    found = plan_step(graph, costs, ram_bytes=ram_bytes, strategy=strategy, time_limit_s=time_limit_s)
    cpu_seconds = time.process_time() - begin
    plan = found.plan
    program = lower(graph, costs, plan) if plan else None
    return Row(
        id=f"{name}-{board}-{percent}",
        nodes=len(graph.ops),
        outcome=found.outcome.name.lower(),
        overhead_joules=plan.overhead_joules if plan else None,
        waiting_joules=costs.device.static_watts * program.stall_seconds if program else None,
        greedy_joules=quick.plan.overhead_joules if quick.plan else None,
        greedy_cpu_seconds=quick.seconds,
        bound_joules=found.bound_joules,
        gap=found.gap,
        seconds=plan.seconds if plan else None,
        deadline_s=None,
        stall_seconds=program.stall_seconds if program else None,
        peak_bytes=plan.peak_bytes if plan else found.needed_bytes,
        ram_bytes=ram_bytes,
        cpu_seconds=cpu_seconds,
        message=found.message,
    )


def show(rows: Sequence[Row], console: Console) -> None:
    """Print the rows as one table, and what to do about each problem without a plan."""
    table = Table(
        "problem",
        "nodes",
        "outcome",
        "overhead J",
        "bound J",
        "gap",
        "greedy J",
        "greedy CPU s",
        "time s",
        "limit s",
        "peak B",
        "CPU s",
    )
    for row in rows:
        table.add_row(
            row.id,
            str(row.nodes),
            row.outcome,
            _figure(row.overhead_joules),
            _figure(row.bound_joules),
            "" if row.gap is None else f"{row.gap:.2%}",
            _figure(row.greedy_joules),
            f"{row.greedy_cpu_seconds:.2f}",
            _figure(row.seconds),
            _figure(row.deadline_s),
            str(row.peak_bytes),
            f"{row.cpu_seconds:.2f}",
        )
    console.print(table)
    for row in rows:
        if row.outcome in (Outcome.INFEASIBLE.name.lower(), Outcome.TIMED_OUT.name.lower()):
            console.print(f"{row.id}: {row.message}")


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit code 1 if a file could not be read, 3 if a problem has no plan."""
    parser = argparse.ArgumentParser(prog="benchmarks.planning", description=__doc__.partition("\n\n")[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--generate", action="append", default=[], metavar="KIND:N", help="bert:N or residual:N blocks")
    parser.add_argument("--captured", action="append", default=[], metavar="MODEL", help="of benchmarks.models")
    parser.add_argument("--board", default="pi4b", help="of captured steps")
    parser.add_argument("--percent", type=int, default=50, help="of what a captured step takes when all is kept")
    parser.add_argument("--semantics", choices=("poet", "real"), default="poet")
    parser.add_argument("--out", type=Path, help="directory for ID.solution.json")
    parser.add_argument("--time-limit", type=float, default=8.0, metavar="S", help="CPU seconds per problem")
    parser.add_argument("--strategy", default="milp")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    if not options.files and not options.generate and not options.captured:
        parser.error("name at least one problem FILE, or --generate bert:62, or --captured resnet50")
    semantics = Semantics(options.semantics)
    rest = (semantics, options.out, options.time_limit, options.strategy)
    jobs: list[Callable[[], Row]] = [partial(plan_file, path, *rest) for path in options.files]
    jobs += [partial(plan_generated, text, *rest) for text in options.generate]
    jobs += [
        partial(plan_captured, name, options.board, options.percent, options.time_limit, options.strategy)
        for name in options.captured
    ]
    rows, failed = [], False
    for job in jobs:
        try:
            rows.append(job())
        except PortError as error:
            print(f"benchmarks.planning: {error}", file=sys.stderr)
            failed = True
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    elif rows:
        show(rows, Console(width=150))
    if failed:
        return 1
    return 3 if any(row.overhead_joules is None for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
