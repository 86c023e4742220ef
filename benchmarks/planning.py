"""Solves planning problems and prints one table: overhead, bound, gap, CPU time.

    python -m benchmarks.planning FILE... --semantics poet|real --out DIR [--time-limit 8] [--strategy milp] [--json]
    python -m benchmarks.planning --generate bert:62 --generate bert:187 --generate residual:70 --time-limit 30

FILE is a problem of POET's kind (see planner.poet); generated ones are described in planner.poet_stacks.
DIR receives ID.solution.json in the checker's format for every problem that has a plan, and ID.json for generated ones.
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

from planner.errors import PortError
from planner.poet import Instance, parse_instance, read_instance, write_solution
from planner.poet_stacks import generate
from planner.problem import Semantics
from planner.solve import Outcome, solve


@dataclass(frozen=True, slots=True)
class Row:
    """One problem and what the planner made of it. `overhead_joules` is what the checker counts.

    `greedy_joules`: what the greedy rung alone gives, waiting included.
    """

    id: str
    nodes: int
    outcome: str
    overhead_joules: float | None
    waiting_joules: float | None
    greedy_joules: float | None
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
    quick = solve(problem, strategy="greedy").overhead_joules
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
        "time s",
        "limit s",
        "peak B",
        "CPU s",
    )
    for row in rows:
        table.add_row(
            row.id, str(row.nodes), row.outcome, _figure(row.overhead_joules), _figure(row.bound_joules),
            "" if row.gap is None else f"{row.gap:.2%}", _figure(row.greedy_joules), _figure(row.seconds),
            _figure(row.deadline_s), str(row.peak_bytes), f"{row.cpu_seconds:.2f}",
        )  # fmt: skip
    console.print(table)
    for row in rows:
        if row.outcome in (Outcome.INFEASIBLE.name.lower(), Outcome.TIMED_OUT.name.lower()):
            console.print(f"{row.id}: {row.message}")


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit code 1 if a file could not be read, 3 if a problem has no plan."""
    parser = argparse.ArgumentParser(prog="benchmarks.planning", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--generate", action="append", default=[], metavar="KIND:N", help="bert:N or residual:N blocks")
    parser.add_argument("--semantics", choices=("poet", "real"), default="poet")
    parser.add_argument("--out", type=Path, help="directory for ID.solution.json")
    parser.add_argument("--time-limit", type=float, default=8.0, metavar="S", help="CPU seconds per problem")
    parser.add_argument("--strategy", default="milp")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    if not options.files and not options.generate:
        parser.error("name at least one problem FILE, or generate one with --generate bert:62")
    semantics = Semantics(options.semantics)
    rest = (semantics, options.out, options.time_limit, options.strategy)
    jobs: list[Callable[[], Row]] = [partial(plan_file, path, *rest) for path in options.files]
    jobs += [partial(plan_generated, text, *rest) for text in options.generate]
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
